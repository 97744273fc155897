"""Names of a worker's database sessions, as PostgreSQL shows them in pg_stat_activity.

Sessions of other databases get no name: MySQLdb cannot set connection attributes, and SQLite has
no sessions.
"""

from __future__ import annotations

import os
import socket

from django.db import connections

from django_eventbus.internals.django import set_option_of_all_threads, set_option_of_this_thread

#: The maximum length of a name. PostgreSQL truncates longer names.
MAX_NAME_BYTES = 63
#: libpq ignores this option if the project sets application_name in OPTIONS, in a service file or
#: by PGAPPNAME.
OPTION = "fallback_application_name"


def name_sessions(role: str) -> None:
    """Name the sessions that any thread of this process opens from now on, on every database."""
    for alias in connections:
        if _has_names(alias):
            set_option_of_all_threads(alias, OPTION, session_name(role))


def name_own_sessions(alias: str, role: str) -> None:
    """Name the sessions that the current thread opens from now on. Other threads are unaffected."""
    if _has_names(alias):
        set_option_of_this_thread(alias, OPTION, session_name(role))


def session_name(role: str) -> str:
    """Return ``eventbus worker <host>:<pid> <role>``, with a long host name truncated."""
    start, end = "eventbus worker ", f":{os.getpid()} {role}"
    host = socket.gethostname().encode("ascii", "replace").decode()
    return start + host[: MAX_NAME_BYTES - len(start) - len(end)] + end


def _has_names(alias: str) -> bool:
    return connections[alias].vendor == "postgresql"
