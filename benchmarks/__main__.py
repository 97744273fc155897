"""The command line. It creates a temporary database and starts a measuring process for each."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchmarks
from benchmarks.databases import DATABASES, scratch
from benchmarks.report import print_table
from benchmarks.run import GROUPS

TAKE_LONG = ("head", "pending", "pages", "celery")
USUALLY = [group for group in GROUPS if group not in TAKE_LONG]


def main() -> None:
    options = parse()
    names = DATABASES if options.database == "all" else (options.database,)
    reports = []
    for name in names:
        report = compared_on(name, options) if options.against else measured_on(name, options)
        reports.append(report)
        if options.format == "table":
            print_table(report)
    if options.format == "json":
        print(json.dumps(reports, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("--database", choices=(*DATABASES, "all"), default="all")
    parser.add_argument(
        "--events", type=int, default=20_000, help="number of events to drain or publish"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="number of runs; the result is the median"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=USUALLY,
        help=f"comma-separated list of {', '.join(GROUPS)};"
        f" default: all except {', '.join(TAKE_LONG)}, which take long",
    )
    parser.add_argument(
        "--against",
        metavar="REVISION",
        help="measure this commit of the repository too, in turns with the working tree",
    )
    parser.add_argument("--format", choices=("table", "json"), default="table")
    options = parser.parse_args()
    for group in options.only:
        if group not in GROUPS:
            parser.error(f"--only {group}: choose from {', '.join(GROUPS)}")
    return options


def compared_on(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure both versions in turns, so that other load on the machine affects both."""
    once = argparse.Namespace(**{**vars(options), "repeat": 1})
    then, now = [], []
    with checkout_of(options.against) as older:
        for _ in range(options.repeat):
            then.append(measured_on(name, once, older))
            now.append(report := measured_on(name, once))
    figures = []
    known = {figure["name"]: figure for figure in medians(then)}
    for after in medians(now):
        before = known.get(after["name"])
        if before is None:  # The older revision does not have this measurement.
            figures.append(after)
            continue
        figures += [
            {**before, "name": f"{before['name']}, {options.against}"},
            {**after, "name": f"{after['name']}, now"},
            {
                "name": "now divided by before",
                "value": after["value"] / before["value"],
                "unit": "x",
            },
        ]
    return {**report, "figures": figures}


def medians(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = zip(*(report["figures"] for report in reports), strict=True)
    return [
        {**column[0], "value": statistics.median(each["value"] for each in column)}
        for column in columns
    ]


@contextmanager
def checkout_of(revision: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eventbus-bench-") as directory:
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", directory, revision], check=True
        )
        try:
            yield Path(directory)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", directory], check=True)


def measured_on(name: str, options: argparse.Namespace, tree: Path | None = None) -> dict[str, Any]:
    """Measure in another process: a process has one set of settings and one package."""
    with scratch(name) as environment:
        command = [
            *(sys.executable, "-m", "benchmarks.run"),
            *("--events", str(options.events)),
            *("--repeat", str(options.repeat)),
            *options.only,
        ]
        measuring = subprocess.run(
            command,
            cwd=tree,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            check=True,
        )
    report: dict[str, Any] = json.loads(measuring.stdout)
    return report


if __name__ == "__main__":
    main()
