"""Choose the database of the tests.

EVENTBUS_TEST_DB is sqlite (the default), postgresql or mariadb. Processes that a test starts
inherit it, and read the name of the test database from EVENTBUS_TEST_DB_NAME (conftest.py).
"""

import json
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests import embedded_postgres

JOURNAL = "EVENTBUS_TEST_SQLITE_JOURNAL"
OPTIONS = "EVENTBUS_TEST_POSTGRES_OPTIONS"
DEFAULT_MARIADB_URL = "mysql://root@127.0.0.1:3306/"

# Random, so that two runs can share one server.
TEST_NAME = f"test_eventbus_{secrets.token_hex(4)}"


def chosen_database() -> dict[str, Any]:
    choice = os.environ.get("EVENTBUS_TEST_DB", "sqlite")
    choices = {"sqlite": sqlite, "postgresql": postgresql, "mariadb": mariadb}
    if choice not in choices:
        raise ValueError(f"EVENTBUS_TEST_DB is {choice!r}; choose one of {', '.join(choices)}")
    return choices[choice]()


def sqlite() -> dict[str, Any]:
    # Files, because an in-memory database cannot be shared with threads and processes.
    directory = Path(tempfile.gettempdir())
    journal = os.environ.get(JOURNAL, "WAL")
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": inherited_name() or directory / "eventbus.sqlite3",
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": f"PRAGMA journal_mode={journal}; PRAGMA synchronous=NORMAL;",
        },
        "TEST": {"NAME": directory / f"{TEST_NAME}.sqlite3"},
    }


def postgresql() -> dict[str, Any]:
    if not os.environ.get("EVENTBUS_TEST_POSTGRES_URL"):
        os.environ["EVENTBUS_TEST_POSTGRES_URL"] = embedded_postgres.start()
    return {
        "ENGINE": "django.db.backends.postgresql",
        **connection_parameters(os.environ["EVENTBUS_TEST_POSTGRES_URL"]),
        "OPTIONS": json.loads(os.environ.get(OPTIONS, "{}")),
        "TEST": {"NAME": TEST_NAME},
    }


def mariadb() -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.mysql",
        **connection_parameters(os.environ.get("EVENTBUS_TEST_MARIADB_URL") or DEFAULT_MARIADB_URL),
        "OPTIONS": {"isolation_level": os.environ.get("EVENTBUS_TEST_ISOLATION", "read committed")},
        "TEST": {"NAME": TEST_NAME, "CHARSET": "utf8mb4"},
    }


def connection_parameters(url: str) -> dict[str, str]:
    """Read user:password@host:port/name; ``?host=`` names the directory of a Unix socket."""
    parts = urlsplit(url)
    return {
        "NAME": inherited_name() or unquote(parts.path.lstrip("/")) or "eventbus",
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": dict(parse_qsl(parts.query)).get("host", parts.hostname or ""),
        "PORT": str(parts.port or ""),
    }


def inherited_name() -> str:
    return os.environ.get("EVENTBUS_TEST_DB_NAME", "")
