"""A temporary database for one run, and its environment variables.

PostgreSQL is the server of EVENTBUS_BENCH_POSTGRES_URL. Without this variable the benchmarks start
the same embedded server as the tests. The embedded server does not sync commits to disk, so set the
variable to measure commits.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.databases import connection_parameters

DATABASES = ("sqlite", "postgresql")


@contextmanager
def scratch(name: str) -> Iterator[dict[str, str]]:
    """Create a temporary database, and return the environment variables that name it."""
    with sqlite_file() if name == "sqlite" else postgresql_database() as environment:
        yield {
            **environment,
            "EVENTBUS_BENCH_DB": name,
            "DJANGO_SETTINGS_MODULE": "benchmarks.settings",
        }


@contextmanager
def sqlite_file() -> Iterator[dict[str, str]]:
    with tempfile.TemporaryDirectory(prefix="eventbus-bench-") as directory:
        yield {"EVENTBUS_BENCH_DB_NAME": str(Path(directory) / "bench.sqlite3")}


@contextmanager
def postgresql_database() -> Iterator[dict[str, str]]:
    import psycopg

    from tests import embedded_postgres

    url = os.environ.get("EVENTBUS_BENCH_POSTGRES_URL") or embedded_postgres.start()
    name = f"bench_eventbus_{secrets.token_hex(4)}"
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        try:
            yield {"EVENTBUS_BENCH_POSTGRES_URL": url, "EVENTBUS_BENCH_DB_NAME": name}
        finally:
            server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def chosen_database() -> dict[str, Any]:
    """Return the database of this process for the settings."""
    name = os.environ["EVENTBUS_BENCH_DB_NAME"]
    if os.environ["EVENTBUS_BENCH_DB"] == "sqlite":
        return {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": name,
            "OPTIONS": {
                "transaction_mode": "IMMEDIATE",
                "timeout": 20,
                "init_command": "PRAGMA journal_mode=WAL;",
            },
        }
    return {
        "ENGINE": "django.db.backends.postgresql",
        **connection_parameters(os.environ["EVENTBUS_BENCH_POSTGRES_URL"]),
        "NAME": name,
    }
