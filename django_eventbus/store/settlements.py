"""What is written about events: what a publisher says of many, what a worker says in the end."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from django_eventbus.models import LogStatus


class NewEvent(NamedTuple):
    """What tells one event of a ``publish_many`` from the next."""

    event_id: uuid.UUID
    type: str
    version: int
    payload: Any
    key: str | None
    counted_as: str | None = None


class Completed(NamedTuple):
    """Every handler did it at the first try: into the log, nothing to tell."""

    row_id: int


class Held(NamedTuple):
    """A gate kept every handler from running: back into the queue as it was, uncharged."""

    row_id: int
    delay: float


class Fate(NamedTuple):
    """How an event ended, as the log's columns have it."""

    status: str
    dead_handler: str = ""
    error_type: str = ""
    error_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The event ended, and there is a story: into the log with both."""

    row_id: int
    status: str = LogStatus.COMPLETED
    deliveries: dict[str, Any] | None
    errors: list[dict[str, Any]]
    dead_handler: str = ""
    error_type: str = ""
    error_fingerprint: str = ""
    #: The lane that its death holds up.
    blocks_lane: int | None = None

    @property
    def fate(self) -> Fate:
        return Fate(self.status, self.dead_handler, self.error_type, self.error_fingerprint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed:
    """Something is still owed: back into the queue, to be ready after ``delay`` seconds."""

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]
    delay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """Some handlers are done and others are next: remember it, keep the claim."""

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]


Story = Finished | Postponed | Progressed
Settlement = Completed | Held | Story
