"""``manage.py publish_event``: publish one event from a shell, refused as ``publish()`` would."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_eventbus import events
from django_eventbus.exceptions import DuplicateEventError, EventBusError
from django_eventbus.failures import one_line
from django_eventbus.management.console import database, event_id
from django_eventbus.publishing import publish
from django_eventbus.registry import registry

STDIN = "-"
#: The options that go to publish() as they are.
PASSED_ON = ("key", "queue", "priority", "delay", "headers", "dedup_key", "event_id")


class Command(BaseCommand):
    help = "Publish an event."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("type", help="the event type: order.placed")
        parser.add_argument(
            "payload", nargs="?", type=_json, help="JSON; - reads it from stdin; default: null"
        )
        parser.add_argument("--key", help="events with the same key are handled in order")
        parser.add_argument("--queue", help="default: EVENTBUS['QUEUE']")
        parser.add_argument("--priority", type=int, default=0, help="higher overtakes (default: 0)")
        parser.add_argument("--delay", type=float, help="seconds to wait before it is handled")
        parser.add_argument("--headers", type=_json, help="a JSON object")
        parser.add_argument("--dedup-key", help="add nothing while this key is queued")
        parser.add_argument("--event-id", type=event_id, help="add nothing if this id is known")
        parser.add_argument("--database", help="the alias that holds the bus")

    def handle(self, *args: Any, **options: Any) -> None:
        passed_on = {name: options[name] for name in PASSED_ON}
        has_identity = options["dedup_key"] is not None or options["event_id"] is not None
        try:
            _check_fields(options["type"], options["payload"])
            event = publish(
                options["type"],
                options["payload"],
                using=database(options["database"]),
                on_duplicate="raise" if has_identity else "skip",
                **passed_on,
            )
        except DuplicateEventError as error:
            self.stdout.write(f"Nothing was added: {one_line(str(error))}.")
            return
        except EventBusError as error:
            raise CommandError(str(error)) from None
        if event is None:
            raise CommandError("Nothing was published: a limit is reached, and its policy is drop.")
        self.stdout.write(f"Published {one_line(event.type)} {event.event_id}.")
        if not registry.handlers_for(event.type).all:
            self.stderr.write(self.style.WARNING("No handler of this project takes that type."))


def _json(text: str) -> Any:
    text = sys.stdin.read() if text == STDIN else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"this is not JSON: {error}") from None


def _check_fields(type_name: str, payload: Any) -> None:
    """A payload typed by hand is compared with the event's class, if it has one."""
    if cls := events.class_for(type_name):
        events.from_payload(cls, payload)
