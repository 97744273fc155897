"""The command line: for each database, a scratch database and a process that measures on it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import benchmarks
from benchmarks.databases import DATABASES, scratch
from benchmarks.report import print_table
from benchmarks.run import GROUPS

USUALLY = [group for group in GROUPS if group != "pending"]


def main() -> None:
    options = parse()
    names = DATABASES if options.database == "all" else (options.database,)
    reports = []
    for name in names:
        reports.append(report := measured_on(name, options))
        if options.format == "table":
            print_table(report)
    if options.format == "json":
        print(json.dumps(reports, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("--database", choices=(*DATABASES, "all"), default="all")
    parser.add_argument("--events", type=int, default=20_000, help="how many to drain or publish")
    parser.add_argument("--repeat", type=int, default=3, help="the median of how many drains")
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=USUALLY,
        help=f"comma-separated, of {', '.join(GROUPS)}; default: all but pending, which takes long",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    for group in options.only:
        if group not in GROUPS:
            parser.error(f"--only {group}: choose from {', '.join(GROUPS)}")
    return options


def measured_on(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, because Django has one set of settings per process."""
    with scratch(name) as environment:
        command = [
            *(sys.executable, "-m", "benchmarks.run"),
            *("--events", str(options.events)),
            *("--repeat", str(options.repeat)),
            *options.only,
        ]
        measuring = subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
        )
    report: dict[str, Any] = json.loads(measuring.stdout)
    return report


if __name__ == "__main__":
    main()
