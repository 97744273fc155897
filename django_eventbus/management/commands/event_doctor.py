"""``manage.py event_doctor``: find out what is wrong with the bus, and what fixes it."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError

from django_eventbus.diagnosis.catalogue import CHECKS, UnknownCheckError, selected
from django_eventbus.diagnosis.examination import Bus, Check, Diagnosis, Result, Verdict, examine
from django_eventbus.errors import failures
from django_eventbus.management.console import database
from django_eventbus.store import Store, store_for

#: The exit code by the worst verdict, and the exit code of a usage error or another failure.
EXIT_CODES = {Verdict.FAIL: 2, Verdict.WARN: 1}
MISTAKEN = 3
WIDEST = 80
#: The commands of a GitHub workflow that annotate a run.
GITHUB_COMMANDS = {
    Verdict.FAIL: "error",
    Verdict.WARN: "warning",
    Verdict.SKIPPED: "notice",
}


class Command(BaseCommand):
    help = "Check the bus, its workers and its database; say what is wrong and what fixes it."
    # A wrong setting must not keep the command from running: the check EB026 reports it.
    requires_system_checks = ()
    _has_found = False

    def run_from_argv(self, argv: list[str]) -> None:
        """Exit with ``MISTAKEN`` after a usage error or a database error.

        The exit codes 1 and 2 mean that checks found something.
        """
        try:
            super().run_from_argv(argv)
        except SystemExit as ended:
            if self._has_found or not ended.code:
                raise
            sys.exit(MISTAKEN)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "action",
            nargs="?",
            choices=("run", "list", "explain"),
            default="run",
            help="run the checks (default), list them, or explain some of them",
        )
        parser.add_argument("ids", nargs="*", metavar="id", help="the checks to explain: EB014")
        parser.add_argument(
            "--only",
            action="append",
            default=[],
            metavar="IDS",
            help="run only these checks: EB014,EB02 (EB02 means EB020 to EB029)",
        )
        parser.add_argument(
            "--ignore", action="append", default=[], metavar="IDS", help="do not run these checks"
        )
        parser.add_argument(
            "--format",
            choices=("text", "json", "github"),
            default="text",
            help="text (default), json, or the annotations of a GitHub workflow",
        )
        parser.add_argument(
            "--fail-on",
            choices=("warn", "fail"),
            default="warn",
            help="with fail, warnings do not change the exit code",
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["ids"] and options["action"] != "explain":
            raise CommandError(
                f"{options['action']} takes no ids: pass --only {','.join(options['ids'])}",
                returncode=MISTAKEN,
            )
        if options["action"] == "explain":
            self._explain(_chosen(options["ids"] or [each.id for each in CHECKS]))
            return
        checks = _chosen(_split(options["only"]), _split(options["ignore"]))
        if options["action"] == "list":
            self._list(checks, options["format"])
        else:
            self._run(checks, options)

    def _list(self, checks: Sequence[Check], format: str) -> None:
        if format == "json":
            self.stdout.write(_json({"checks": [_described(each) for each in checks]}))
            return
        for each in checks:
            self.stdout.write(f"{each.id}  {each.title}")

    def _explain(self, checks: Sequence[Check]) -> None:
        blocks = []
        for each in checks:
            heading = self.style.MIGRATE_HEADING(f"{each.id}  {each.title}")
            parts = [("Symptom", each.symptom), ("Cause", each.cause), ("Fix", each.fix)]
            parts.append(("Databases", ", ".join(each.databases)))
            lines = [_wrapped(f"{name}: {text}", "  ") for name, text in parts]
            blocks.append("\n".join([heading, *lines]))
        self.stdout.write("\n\n".join(blocks))

    def _run(self, checks: Sequence[Check], options: dict[str, Any]) -> None:
        store = _available(database(options["database"]))
        found = []
        for diagnosis in examine(Bus(store), checks):
            found.append(diagnosis)
            if options["format"] == "text" and store.database_name in diagnosis.check.databases:
                self._show(diagnosis)
            elif options["format"] == "github":
                for line in _annotations(diagnosis):
                    self.stdout.write(line)
        if options["format"] == "json":
            self.stdout.write(_as_json(store.using, store.database_name, found))
        if options["format"] == "text":
            self.stdout.write(f"\n{_totals(found, store.database_name)}")
        code = _exit_code(found, options["fail_on"])
        if code:
            self._has_found = True
            raise CommandError(_summary(found), returncode=code)

    def _show(self, diagnosis: Diagnosis) -> None:
        styles = {
            Verdict.OK: self.style.SUCCESS,
            Verdict.WARN: self.style.WARNING,
            Verdict.FAIL: self.style.ERROR,
            Verdict.SKIPPED: self.style.NOTICE,
        }
        for each in diagnosis.results:
            mark = styles[each.verdict](f"{each.verdict:<7}")
            start = f"{diagnosis.check.id}  {each.verdict:<7}  "
            # The title names a fault, so it would be wrong beside ok.
            title = "" if each.verdict is Verdict.OK else f"{diagnosis.check.title}: "
            text = _wrapped(f"{start}{title}{each.summary}", "", " " * len(start))
            self.stdout.write(text.replace(f"{each.verdict:<7}", mark, 1))
            if each.fix:
                for line in each.fix.splitlines():
                    self.stdout.write(f"{' ' * len(start)}Fix: {line}")


def _chosen(only: Iterable[str], ignored: Iterable[str] = ()) -> list[Check]:
    try:
        return selected(only, ignored)
    except UnknownCheckError as error:
        raise CommandError(str(error), returncode=MISTAKEN) from None


def _split(values: Iterable[str]) -> list[str]:
    return [each for value in values for each in value.split(",")]


def _exit_code(found: Iterable[Diagnosis], fail_on: str) -> int:
    codes = [EXIT_CODES.get(each.verdict, 0) for each in found]
    worst = max(codes, default=0)
    return worst if worst >= EXIT_CODES[Verdict(fail_on)] else 0


def _available(alias: str) -> Store:
    """Return the store; raise CommandError if the database is unavailable."""
    store = store_for(alias)
    try:
        store.connection.ensure_connection()
    except OperationalError as error:
        raise CommandError(
            f"the database {alias!r} is not available: {failures.in_a_line(error)}",
            returncode=MISTAKEN,
        ) from error
    return store


def _totals(found: Sequence[Diagnosis], database_name: str) -> str:
    applicable = [each for each in found if database_name in each.check.databases]
    counts = Counter(each.verdict for each in applicable)
    text = ", ".join(f"{counts[each]} {each}" for each in Verdict)
    others = len(found) - len(applicable)
    return f"{text}; {others} checks are for other databases" if others else text


def _summary(found: Sequence[Diagnosis]) -> str:
    words = {Verdict.FAIL: "failed", Verdict.WARN: "warned"}
    ids = {
        word: ", ".join(each.check.id for each in found if each.verdict is verdict)
        for verdict, word in words.items()
    }
    return "; ".join(f"{text} {word}" for word, text in ids.items() if text)


def _as_json(alias: str, database_name: str, found: Sequence[Diagnosis]) -> str:
    counts = Counter(each.verdict for each in found)
    return _json(
        {
            "database": {"alias": alias, "name": database_name},
            "totals": {each.value: counts[each] for each in Verdict},
            "checks": [
                {
                    "id": each.check.id,
                    "title": each.check.title,
                    "verdict": each.verdict,
                    "results": [_result(result) for result in each.results],
                }
                for each in found
            ],
        }
    )


def _result(result: Result) -> dict[str, str]:
    return {"verdict": result.verdict, "summary": result.summary, "fix": result.fix}


def _described(check: Check) -> dict[str, Any]:
    return {"id": check.id, "title": check.title, "databases": list(check.databases)}


def _json(record: Any) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False)


def _annotations(diagnosis: Diagnosis) -> Iterable[str]:
    title = _escaped(f"{diagnosis.check.id} {diagnosis.check.title}", ":,")
    for each in diagnosis.results:
        if each.verdict in GITHUB_COMMANDS:
            text = f"{each.summary}\nFix: {each.fix}" if each.fix else each.summary
            yield f"::{GITHUB_COMMANDS[each.verdict]} title={title}::{_escaped(text)}"


def _escaped(text: str, more: str = "") -> str:
    """Escape the characters that end a workflow command, or a value of its properties."""
    for character in f"%\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _wrapped(text: str, first: str, rest: str | None = None) -> str:
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=first,
        subsequent_indent=first + "  " if rest is None else rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
