"""``manage.py event_pause``: pause and resume queues, event types and handlers; list what is."""

from __future__ import annotations

import getpass
import json
import socket
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder

from django_eventbus import gates
from django_eventbus.exceptions import EventBusError
from django_eventbus.failures import one_line
from django_eventbus.management.console import database
from django_eventbus.models import EventGate, GateKind
from django_eventbus.registry import did_you_mean

COLUMNS = ("kind", "name", "paused_at", "paused_by", "reason")


class Command(BaseCommand):
    help = "Pause a queue, an event type or a handler; without one, list what is paused."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("kind", nargs="?", choices=GateKind.values, help="what to pause")
        parser.add_argument(
            "name", nargs="?", help="its name; for a type also a pattern: 'order.*'"
        )
        parser.add_argument("--resume", action="store_true", help="end the pause")
        parser.add_argument("--reason", default="", help="why, for those who find it paused")
        parser.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="of the list: a table for people (the default), or one JSON array",
        )
        parser.add_argument("--database", help="the alias that holds the bus")

    def handle(self, *args: Any, **options: Any) -> None:
        kind, name = options["kind"], options["name"]
        using = database(options["database"])
        if kind is not None and name is None:
            raise CommandError(f"Say which {kind}: event_pause {kind} NAME")
        try:
            if kind is None:
                self._list(using, options)
            elif options["resume"]:
                self._resume(kind, name, using)
            else:
                self._pause(kind, name, options["reason"], using)
        except EventBusError as error:
            raise CommandError(str(error)) from error

    def _list(self, using: str, options: dict[str, Any]) -> None:
        if options["resume"] or options["reason"]:
            raise CommandError("Say what: a kind (queue, type or handler) and a name")
        paused = gates.list(using=using)
        if options["format"] == "json":
            self.stdout.write(_as_json(paused))
        elif not paused:
            self.stdout.write("Nothing is paused.")
        for each in paused if options["format"] == "table" else ():
            why = f": {one_line(each.reason)}" if each.reason else ""
            when = f"{each.paused_at:%Y-%m-%d %H:%M:%S %Z}"
            self.stdout.write(
                f"{one_line(str(each))}, since {when} by {one_line(each.paused_by)}{why}"
            )

    def _pause(self, kind: str, name: str, reason: str, using: str) -> None:
        chosen: dict[str, Any] = {kind: name}
        done = gates.pause(**chosen, reason=reason, by=_me(), using=using)
        self.stdout.write(f"The {kind} {name!r} is {'now' if done else 'already'} paused.")

    def _resume(self, kind: str, name: str, using: str) -> None:
        chosen: dict[str, Any] = {kind: name}
        if not gates.resume(**chosen, by=_me(), using=using):
            paused = [each.name for each in gates.list(using=using) if each.kind == kind]
            raise CommandError(f"the {kind} {name!r} is not paused{did_you_mean(name, paused)}")
        self.stdout.write(f"The {kind} {name!r} goes on.")


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "somebody"  # in a container without a user database
    return f"{user}@{socket.gethostname()}"[: gates.MOST_LETTERS["by"]]


def _as_json(paused: Sequence[EventGate]) -> str:
    records = [{name: getattr(each, name) for name in COLUMNS} for each in paused]
    return json.dumps(records, cls=DjangoJSONEncoder, indent=2)
