"""``manage.py`` for a child of the demo: ends when its standard input does.

That is how it learns that the demo is gone, even when that was killed. Run as
``python -m demo.child runserver …``.
"""

import os
import signal
import threading

from manage import main


def follow_parent() -> None:
    os.read(0, 1)  # nobody writes: it returns when the pipe ends
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=follow_parent, daemon=True).start()
    main()
