"""Data classes for writes: new events of publish_many, and the settlements of a worker."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from django_eventbus.models import LogStatus
from django_eventbus.schema.deliveries import DEAD, DISCARDED, DONE, RETRY
from django_eventbus.store.waits import AT_ONCE, Wait

#: The value of ``counts_as`` for an event that stays claimed, or returns to the queue unchanged.
#: Statistics do not count such an event.
UNCOUNTED = ""
_COUNTED_AS: dict[str, str] = {
    LogStatus.COMPLETED: DONE,
    LogStatus.COMPLETED_WITH_ERRORS: DEAD,
    LogStatus.FAILED: DEAD,
    LogStatus.DISCARDED: DISCARDED,
}


class NewEvent(NamedTuple):
    """The fields that differ between the events of one ``publish_many``."""

    event_id: uuid.UUID
    type: str
    version: int
    payload: Any
    key: str | None
    counted_as: str | None = None


class _Kind:
    """The meaning of a settlement for the event, its lane and its batch.

    Callers read these properties and do not check the class. Only the store checks the class,
    because it writes each class by a different statement.
    """

    __slots__ = ()

    @property
    def ends(self) -> bool:
        """Whether the event moves from the queue to the log."""
        return False

    @property
    def status(self) -> str:
        """The status in the log, if the event ends."""
        return ""

    @property
    def is_dead(self) -> bool:
        """Whether the event ended with another status than COMPLETED."""
        return False

    @property
    def is_held(self) -> bool:
        """Whether no handler was allowed to run."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether other handlers of the event run next under the same claim."""
        return False

    @property
    def is_on_disk(self) -> bool:
        """Whether the row is up to date already, so that nothing has to be written."""
        return False

    @property
    def counts_as(self) -> str:
        """The outcome under which statistics count the event."""
        return UNCOUNTED

    @property
    def hand_off(self) -> HandOff | None:
        """The delivery that is handed off to another executor; None if none is handed off."""
        return None

    @property
    def holds_lane(self) -> Wait | None:
        """How long the next events of the same lane have to wait; None if they need not wait."""
        return None


@dataclass(slots=True)
class Completed(_Kind):
    """Every handler succeeded at the first attempt: move the event to the log without details."""

    ends: ClassVar[bool] = True
    status: ClassVar[str] = LogStatus.COMPLETED
    is_on_disk: ClassVar[bool] = False
    counts_as: ClassVar[str] = DONE

    row_id: int


@dataclass(slots=True)
class Held(_Kind):
    """No handler was allowed to run: return the event to the queue, uncharged."""

    is_held: ClassVar[bool] = True

    row_id: int
    wait: Wait

    @property
    def holds_lane(self) -> Wait:
        return self.wait


class Ending(NamedTuple):
    """The columns of the log that describe how an event ended."""

    status: str
    dead_handler: str = ""
    error_type: str = ""
    error_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(_Kind):
    """The event ended after a failure: move it to the log with its deliveries and errors."""

    ends: ClassVar[bool] = True

    row_id: int
    status: str = LogStatus.COMPLETED
    deliveries: dict[str, Any] | None
    errors: list[dict[str, Any]]
    dead_handler: str = ""
    error_type: str = ""
    error_fingerprint: str = ""
    #: The id of the lane that this dead event blocks; None if it blocks no lane.
    blocks_lane: int | None = None

    @property
    def is_dead(self) -> bool:
        return self.status != LogStatus.COMPLETED

    @property
    def counts_as(self) -> str:
        return _COUNTED_AS[self.status]

    @property
    def holds_lane(self) -> Wait | None:
        return None if self.blocks_lane is None else AT_ONCE

    @property
    def ending(self) -> Ending:
        return Ending(self.status, self.dead_handler, self.error_type, self.error_fingerprint)


class HandOff(NamedTuple):
    """The handler that another executor has to run, and the token of the message."""

    handler: str
    token: uuid.UUID
    #: The seconds within which the executor has to claim the event.
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Postponed(_Kind):
    """A handler has to run later: return the event to the queue, where it is ready after a wait.

    With a ``hand_off``, the wait is the time that the other executor has to claim the event.
    """

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]
    wait: Wait
    hand_off: HandOff | None = None

    @property
    def counts_as(self) -> str:
        return RETRY if self.hand_off is None else UNCOUNTED

    @property
    def holds_lane(self) -> Wait:
        return self.wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed(_Kind):
    """Some handlers are done and others run next: store the deliveries and keep the claim."""

    goes_on: ClassVar[bool] = True

    row_id: int
    deliveries: dict[str, Any]
    errors: list[dict[str, Any]]

    @property
    def is_on_disk(self) -> bool:
        return not self.deliveries


WithDeliveries = Finished | Postponed | Progressed
Settlement = Completed | Held | WithDeliveries
