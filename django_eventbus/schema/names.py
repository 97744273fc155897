"""The format of names: event types, keys, queues, handlers."""

from __future__ import annotations

from django_eventbus.exceptions import InvalidPayloadError

MAX_NAME_LENGTH = 200
#: The prefix of the types of the bus's own events.
OWN_TYPES = "django_eventbus."


def check_name(value: object, what: str) -> None:
    """Raise InvalidPayloadError for a name that a column would refuse or change."""
    if not isinstance(value, str) or not value:
        raise InvalidPayloadError(f"{what} must be a non-empty string, not {value!r}")
    if len(value) > MAX_NAME_LENGTH:
        raise InvalidPayloadError(
            f"{what} has {len(value)} characters, {MAX_NAME_LENGTH} are allowed: {value[:40]!r}…"
        )
    if not value.isprintable() or value != value.strip():
        raise InvalidPayloadError(
            f"{what} must be printable, without leading or trailing whitespace: {value!r}"
        )
