"""The options of one ``publish()`` call, and their validation."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal, Self, get_args

from django.db.models import Value
from django.utils import timezone

from django_eventbus.conf import settings
from django_eventbus.errors.suggestions import check_queue, did_you_mean
from django_eventbus.exceptions import (
    DuplicateEventError,
    InvalidPayloadError,
)
from django_eventbus.models import QueuedEvent
from django_eventbus.schema.clock import DatabaseNow
from django_eventbus.schema.names import check_name
from django_eventbus.schema.payloads import check_payload

MAX_PRIORITY = 32767
LAST_YEAR = 2999
A_CENTURY = timedelta(days=36500)
OnDuplicate = Literal["skip", "raise"]
ON_DUPLICATE = get_args(OnDuplicate)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of ``publish()`` and ``publish_many()``.

    The event and its payload, key and database are not included.
    """

    queue: str | None
    priority: int
    delay: float | timedelta | None
    at: datetime | None
    dedup_key: str | None
    headers: dict[str, Any] | None
    event_id: uuid.UUID | None
    dedup_for: timedelta | None = None
    on_duplicate: str = "skip"

    @property
    def has_identity(self) -> bool:
        """Whether the event can be a duplicate: the caller passed an event id or a dedup key."""
        return self.event_id is not None or self.dedup_key is not None

    @property
    def queue_name(self) -> str:
        return self.queue or settings.QUEUE

    def with_headers(self, headers: dict[str, Any] | None) -> Self:
        return self if headers is self.headers else replace(self, headers=headers)

    def known(self, event: QueuedEvent) -> QueuedEvent:
        """Return the existing event, or raise DuplicateEventError as ``on_duplicate`` says."""
        if self.on_duplicate == "raise":
            name = f"dedup key {self.dedup_key!r}" if self.dedup_key else f"id {self.event_id}"
            raise DuplicateEventError(f"an event with the {name} exists already: {event}")
        return event

    def check(self, deepest: int) -> None:
        """Raise InvalidPayloadError or UnknownQueueError for an option that is not allowed.

        ``deepest`` is the maximum number of JSON levels that the database accepts.
        """
        if self.dedup_key is not None:
            check_name(self.dedup_key, "the dedup key")
        if self.queue is not None:
            check_queue(self.queue)
        is_number = isinstance(self.priority, int) and not isinstance(self.priority, bool)
        if not is_number or abs(self.priority) > MAX_PRIORITY:
            raise InvalidPayloadError(
                f"the priority must be an integer between -{MAX_PRIORITY} and {MAX_PRIORITY}, "
                f"not {self.priority!r}"
            )
        if self.event_id is not None and not isinstance(self.event_id, uuid.UUID):
            raise InvalidPayloadError(f"the event id must be a UUID, not {self.event_id!r}")
        if self.headers is not None:
            if not isinstance(self.headers, dict):
                raise InvalidPayloadError(f"headers must be a dict, not {self.headers!r}")
            check_payload(self.headers, "headers", depth=deepest)
        self._check_times()
        if self.dedup_for is not None or self.on_duplicate != "skip":
            self._check_dedup()

    def _check_dedup(self) -> None:
        if self.on_duplicate not in ON_DUPLICATE:
            hint = did_you_mean(str(self.on_duplicate), ON_DUPLICATE)
            raise InvalidPayloadError(f"on_duplicate cannot be {self.on_duplicate!r}{hint}")
        if not self.has_identity:
            raise InvalidPayloadError(
                "on_duplicate needs a dedup_key or an event_id, and dedup_for needs a dedup_key"
            )
        if self.dedup_for is None:
            return
        if self.dedup_key is None:
            raise InvalidPayloadError("dedup_for needs a dedup_key")
        if not isinstance(self.dedup_for, timedelta) or not (
            timedelta(0) < self.dedup_for <= A_CENTURY
        ):
            raise InvalidPayloadError(
                "dedup_for must be a timedelta of more than 0 and at most 100 years, such as "
                f"timedelta(hours=1), not {self.dedup_for!r}"
            )

    def _check_times(self) -> None:
        if self.delay is not None and self.at is not None:
            raise InvalidPayloadError("pass delay or at, not both")
        if self.at is not None and (
            not isinstance(self.at, datetime) or timezone.is_naive(self.at)
        ):
            raise InvalidPayloadError(f"at must be a datetime with a time zone, not {self.at!r}")
        if self.at is not None and not 1970 <= self.at.year <= LAST_YEAR:
            raise InvalidPayloadError(
                f"at must be in a year from 1970 to {LAST_YEAR}, not {self.at!r}"
            )
        if self.delay is not None:
            try:
                allowed = timedelta(0) <= self.delay_time <= A_CENTURY
            except (TypeError, ValueError, OverflowError):
                allowed = False
            if not allowed:
                raise InvalidPayloadError(
                    f"the delay must be a number of seconds or a timedelta, from 0 to 100 years, "
                    f"not {self.delay!r}"
                )

    @property
    def delay_time(self) -> timedelta:
        if isinstance(self.delay, timedelta):
            return self.delay
        return timedelta(seconds=self.delay or 0)

    @property
    def due_at(self) -> Any:
        """The time at which the event may run; None if it may run at once.

        A delay is added to the database's time.
        """
        if self.at is not None:
            return self.at
        return DatabaseNow() + Value(self.delay_time) if self.delay_time else None
