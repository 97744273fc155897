"""``manage.py event_pause``: pause or resume a queue, type or handler, or list all pauses."""

from __future__ import annotations

import getpass
import json
import socket
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder

from django_eventbus import pauses
from django_eventbus.errors.suggestions import did_you_mean
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.management.console import database
from django_eventbus.models import FlowControl

COLUMNS = ("kind", "name", "paused_at", "paused_by", "reason")


class Command(BaseCommand):
    help = (
        "Pause or resume a queue, an event type or a handler; without arguments, list the pauses."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("kind", nargs="?", choices=pauses.KINDS, help="what to pause or resume")
        parser.add_argument("name", nargs="?", help="the name, or a pattern of types: 'order.*'")
        parser.add_argument("--resume", action="store_true", help="end the pause")
        parser.add_argument(
            "--reason", default="", help="reason of the pause, shown to other operators"
        )
        parser.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="format of the list: table (default) or json, one array",
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        kind, name = options["kind"], options["name"]
        using = database(options["database"])
        if kind is not None and name is None:
            raise CommandError(f"The name of the {kind} is missing: event_pause {kind} NAME")
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
            raise CommandError(
                "--resume and --reason need a kind (queue, type or handler) and a name: "
                "event_pause queue default --resume"
            )
        paused = pauses.list(using=using)
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
        done = pauses.pause(**chosen, reason=reason, by=_operator(), using=using)
        if done:
            self.stdout.write(f"Paused {kind} {name!r}.")
        else:
            self.stdout.write(f"The {kind} {name!r} was already paused; its reason is unchanged.")

    def _resume(self, kind: str, name: str, using: str) -> None:
        chosen: dict[str, Any] = {kind: name}
        if not pauses.resume(**chosen, by=_operator(), using=using):
            paused = [each.name for each in pauses.list(using=using) if each.kind == kind]
            raise CommandError(f"the {kind} {name!r} is not paused{did_you_mean(name, paused)}")
        self.stdout.write(f"Resumed {kind} {name!r}.")


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"  # A container may have no name for its user id.
    return f"{user}@{socket.gethostname()}"[: pauses.MOST_LETTERS["by"]]


def _as_json(paused: Sequence[FlowControl]) -> str:
    records = [{name: getattr(each, name) for name in COLUMNS} for each in paused]
    return json.dumps(records, cls=DjangoJSONEncoder, indent=2)
