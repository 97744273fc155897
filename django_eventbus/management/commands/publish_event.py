"""``manage.py publish_event``: publish an event; its payload is validated."""

from __future__ import annotations

import difflib
import json
import sys
from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from django_eventbus import events
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import DuplicateEventError, EventBusError
from django_eventbus.management.console import database, event_id
from django_eventbus.publishing.publisher import publish
from django_eventbus.registry import registry
from django_eventbus.schema.typed_payloads import from_payload

STDIN = "-"
#: The options that are passed to publish() unchanged.
PASSED_ON = ("key", "queue", "priority", "delay", "headers", "dedup_key", "event_id")


class Command(BaseCommand):
    help = "Publish an event."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("type", help="the event type: order.placed")
        parser.add_argument(
            "payload",
            nargs="?",
            type=_json,
            help="the payload as JSON, or - to read the JSON from stdin (default: null)",
        )
        parser.add_argument("--key", help="events with the same key are handled in order")
        parser.add_argument("--queue", help="default: EVENTBUS['QUEUE']")
        parser.add_argument(
            "--priority",
            type=int,
            default=0,
            help="higher priorities are handled first (default: 0)",
        )
        parser.add_argument("--delay", type=float, help="seconds before the event is handled")
        parser.add_argument("--headers", type=_json, help="a JSON object")
        parser.add_argument(
            "--dedup-key", help="do not publish while an event with this key is queued"
        )
        parser.add_argument(
            "--event-id", type=event_id, help="do not publish if an event with this id exists"
        )
        parser.add_argument("--database", help="alias of the database that contains the events")

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
            self.stdout.write(f"No event was published: {one_line(str(error))}.")
            return
        except EventBusError as error:
            raise CommandError(str(error)) from None
        if event is None:
            raise CommandError(
                "No event was published: a limit is reached and its overflow policy is drop."
            )
        self.stdout.write(f"Published {one_line(event.type)} {event.event_id}.")
        if not registry.handlers_for(event.type).all:
            self.stderr.write(self.style.WARNING(_unhandled(event.type)))


def _unhandled(type_name: str) -> str:
    """Return a warning that the type has no handler, with a similar known type."""
    subjects = (subject for each in registry.all() for subject in each.subjects)
    named = {each for each in subjects if isinstance(each, str) and "*" not in each}
    known = (named | set(events.declared_types())) - {type_name}
    close = difflib.get_close_matches(type_name, sorted(known), n=1, cutoff=0.8)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    return f"No handler of this project handles {one_line(type_name)!r}.{meant}"


def _json(text: str) -> Any:
    text = sys.stdin.read() if text == STDIN else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentTypeError(f"not valid JSON: {error}") from None


def _check_fields(type_name: str, payload: Any) -> None:
    """Validate the payload against the Event class of the type, if there is one."""
    if cls := events.class_for(type_name):
        from_payload(cls, payload)
