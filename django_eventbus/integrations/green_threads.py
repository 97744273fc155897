"""Refuse processes whose threads are green threads of gevent or eventlet.

Such a process cannot renew its registration while a handler computes. And the exception that
interrupts a handler at its deadline could be raised in another green thread.
"""

from __future__ import annotations

import sys

from django_eventbus.exceptions import EventBusError

#: For each library: its module, the function of this module that returns whether a standard module
#: is patched, and the argument of the function.
_LIBRARIES = {
    "gevent": ("gevent.monkey", "is_module_patched", "threading"),
    "eventlet": ("eventlet.patcher", "is_monkey_patched", "thread"),
}


def refuse_green_threads() -> None:
    """Raise EventBusError if gevent or eventlet has replaced the threads of this process."""
    for library, (module, function, patched) in _LIBRARIES.items():
        # A library that is not imported has replaced no threads, so it is not imported here.
        if module in sys.modules and getattr(sys.modules[module], function)(patched):
            raise EventBusError(
                f"The event bus does not handle events in a process with green threads of "
                f"{library}. Start the Celery worker with --pool prefork, threads or solo."
            )
