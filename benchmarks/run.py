"""Measure on the database of the settings; write JSON to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from typing import Any

import django

GROUPS = (
    *("publish", "drain", "keys", "recovery", "head", "latency", "pending", "pages", "celery"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, required=True)
    parser.add_argument("--repeat", type=int, required=True)
    parser.add_argument("groups", nargs="+", choices=GROUPS)
    options = parser.parse_args()
    django.setup()
    json.dump(measure(options), sys.stdout)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from django.core.management import call_command
    from django.db import connection

    from benchmarks import draining, handing_off, latency, pages, publishing, recovering

    measurements = {
        "publish": publishing.measure,
        "drain": draining.measure,
        "keys": draining.measure_keys,
        "recovery": recovering.measure,
        "head": draining.measure_failing_head,
        "latency": latency.measure,
        "pending": draining.measure_pending,
        "pages": pages.measure,
        "celery": handing_off.measure,
    }
    call_command("migrate", run_syncdb=True, verbosity=0)
    figures = []
    for group in options.groups:
        print(f"{connection.display_name}: {group} …", file=sys.stderr, flush=True)
        figures += measurements[group](options)
    return {**surroundings(), "figures": [dataclasses.asdict(each) for each in figures]}


def surroundings() -> dict[str, Any]:
    from django.db import connection

    version = ".".join(map(str, connection.get_database_version()))
    return {
        "database": f"{connection.display_name} {version}",
        "python": platform.python_version(),
        "django": django.get_version(),
    }


if __name__ == "__main__":
    main()
