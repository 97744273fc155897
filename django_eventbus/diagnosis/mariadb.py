"""Checks of MariaDB and MySQL: EB040 to EB044."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import (
    MARIADB,
    Bus,
    Result,
    check,
    fail,
    listed,
    ok,
    warn,
)

STRICT = {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"}
#: A statement may contain this many events of the maximum size: publish_many() sends chunks.
EVENTS_IN_A_STATEMENT = 16


@check(
    "EB040",
    title="MariaDB isolation level",
    symptom="Deadlocks between publishers and workers, and publishers that wait for each other.",
    cause="The isolation level of the connections is not READ COMMITTED. At REPEATABLE READ, "
    "InnoDB also locks gaps between rows, and a long transaction reads an old snapshot.",
    fix="Remove isolation_level from OPTIONS of the database, because Django's default is "
    '"read committed", and remove SET TRANSACTION from init_command.',
    databases=(MARIADB,),
)
def isolation_level(bus: Bus) -> Iterator[Result]:
    level = str(_session(bus)["isolation"]).replace("-", " ")
    if level == "READ COMMITTED":
        yield ok("the isolation level is READ COMMITTED")
    else:
        yield warn(
            f"the isolation level is {level}",
            fix=f'DATABASES["{bus.store.using}"]["OPTIONS"]["isolation_level"] = "read committed"',
        )


@check(
    "EB041",
    title="MariaDB that may lose commits",
    symptom="After a crash of the server, events and other rows that were committed are missing.",
    cause="innodb_flush_log_at_trx_commit is not 1, so the server does not write the log to disk "
    "at each commit.",
    fix="Set innodb_flush_log_at_trx_commit = 1 in the configuration of the server. If your "
    "project accepts the loss of up to a second, ignore this check.",
    databases=(MARIADB,),
)
def lossy_commits(bus: Bus) -> Iterator[Result]:
    value = int(_session(bus)["flush_at_commit"])
    text = f"innodb_flush_log_at_trx_commit is {value}"
    if value == 1:
        yield ok(text)
    else:
        yield warn(text, fix="SET GLOBAL innodb_flush_log_at_trx_commit = 1;")


@check(
    "EB042",
    title="MariaDB without strict mode",
    symptom="Values that are too long are stored truncated, without an error.",
    cause="sql_mode contains neither STRICT_TRANS_TABLES nor STRICT_ALL_TABLES, so the server "
    "changes invalid values instead of refusing them.",
    fix="Add STRICT_TRANS_TABLES to sql_mode in the configuration of the server, and remove a "
    "sql_mode without it from OPTIONS of the database.",
    databases=(MARIADB,),
)
def not_strict(bus: Bus) -> Iterator[Result]:
    modes = set(str(_session(bus)["sql_mode"]).split(","))
    if modes & STRICT:
        yield ok(f"sql_mode contains {listed(modes & STRICT)}")
    else:
        yield fail(
            f"sql_mode is not strict: {listed(modes - {''}) or 'empty'}",
            fix="SET GLOBAL sql_mode = CONCAT(@@GLOBAL.sql_mode, ',STRICT_TRANS_TABLES');",
        )


@check(
    "EB043",
    title="MariaDB with a small max_allowed_packet",
    symptom='publish_many() or a worker fails with "packet bigger than max_allowed_packet '
    'bytes" or "MySQL server has gone away".',
    cause="A statement with several large events is larger than max_allowed_packet of the server.",
    fix="Increase max_allowed_packet in the configuration of the server, or lower "
    'EVENTBUS["MAX_PAYLOAD_BYTES"].',
    databases=(MARIADB,),
)
def small_packets(bus: Bus) -> Iterator[Result]:
    largest = int(_session(bus)["max_allowed_packet"])
    # Escaping may double the size of a payload.
    needed = 2 * EVENTS_IN_A_STATEMENT * int(settings.MAX_PAYLOAD_BYTES)
    text = f"max_allowed_packet is {_size(largest)}"
    if largest >= needed:
        yield ok(text)
    else:
        yield warn(
            f"{text}, less than the {_size(needed)} of {EVENTS_IN_A_STATEMENT} events of "
            "MAX_PAYLOAD_BYTES",
            fix=f"Run: SET GLOBAL max_allowed_packet = {needed};",
        )


@check(
    "EB044",
    title="Tables that are not InnoDB",
    symptom="A rolled-back transaction leaves its events in the queue, or events disappear after a "
    "crash.",
    cause="Tables of the bus use a storage engine without transactions, such as MyISAM or Aria, "
    "because it was the default engine when they were created.",
    fix="Convert each table with ALTER TABLE … ENGINE=InnoDB while no worker is running.",
    databases=(MARIADB,),
)
def engines(bus: Bus) -> Iterator[Result]:
    found = bus.store.table_engines()
    others = {table: engine for table, engine in found.items() if engine.upper() != "INNODB"}
    if not others:
        yield ok(f"{len(found)} tables of the bus use InnoDB")
        return
    yield fail(
        "tables without transactions: "
        + listed(f"{table} ({engine})" for table, engine in others.items()),
        fix="\n".join(f"Run: ALTER TABLE {table} ENGINE=InnoDB;" for table in sorted(others)),
    )


def _session(bus: Bus) -> dict[str, Any]:
    return bus.store.session_settings()


def _size(count: int) -> str:
    return f"{count / 1024 / 1024:g} MiB"
