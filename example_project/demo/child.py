"""``manage.py`` or ``celery`` for a process of the demo. It ends when its standard input is closed.

So it ends with the demo, even if the demo was killed. Run it as
``python -m demo.child runserver …`` or ``python -m demo.child celery worker …``.
"""

import os
import signal
import sys
import threading

from manage import main


def follow_parent() -> None:
    os.read(0, 1)  # No process writes to the pipe, so read() returns when it is closed.
    os.kill(os.getpid(), signal.SIGTERM)


def run_celery() -> None:
    from celery.__main__ import main as celery_main

    del sys.argv[1]
    celery_main()


if __name__ == "__main__":
    threading.Thread(target=follow_parent, daemon=True).start()
    if sys.argv[1] == "celery":
        run_celery()
    else:
        main()
