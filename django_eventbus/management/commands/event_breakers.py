"""``manage.py event_breakers``: list all circuit breakers, or reset a circuit breaker."""

from __future__ import annotations

import dataclasses
import json
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder

from django_eventbus import breakers
from django_eventbus.breakers import BreakerStatus
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.management.console import database


class Command(BaseCommand):
    help = "List the circuit breakers of handlers, or reset one."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--reset", metavar="HANDLER", help="close the circuit breaker of this handler"
        )
        parser.add_argument(
            "--format",
            choices=("table", "json"),
            default="table",
            help="format of the list: table (default) or json, one array",
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

    def handle(self, *args: Any, **options: Any) -> None:
        using = database(options["database"])
        if options["reset"] is not None:
            self._reset(options["reset"], using)
            return
        found = breakers.list(using=using)
        if options["format"] == "json":
            records = [dataclasses.asdict(each) for each in found]
            self.stdout.write(json.dumps(records, cls=DjangoJSONEncoder, indent=2))
            return
        for each in found:
            self.stdout.write(_in_words(each))
        if not found:
            self.stdout.write("No handler has a circuit breaker.")

    def _reset(self, handler: str, using: str) -> None:
        try:
            was_open = breakers.reset(handler, using=using)
        except EventBusError as error:
            raise CommandError(str(error)) from error
        if was_open:
            self.stdout.write(f"Reset the circuit breaker of {handler}.")
        else:
            self.stdout.write(f"The circuit breaker of {handler} was not open; nothing changed.")


def _in_words(breaker: BreakerStatus) -> str:
    text = f"{one_line(breaker.handler)}: {breaker.state}"
    text += f", {breaker.failures} of {breaker.calls} calls failed"
    if breaker.opened_at is not None:
        text += f", open since {breaker.opened_at:%Y-%m-%d %H:%M:%S %Z}"
    if breaker.state == "open" and breaker.probe_at is not None:
        text += f", next try at {breaker.probe_at:%H:%M:%S %Z}"
    return text
