"""A claimed row of the queue."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime


@dataclass(slots=True)
class Claim:
    """The values that all events of one claim share."""

    token: uuid.UUID
    worker_id: uuid.UUID
    namespace: str
    queue: str
    #: The alias of the database of the events.
    using: str
    #: The monotonic time at which the database answered the claim. If this were the time of the
    #: request, ``database_now`` would be ahead of the database, and handlers would run too early.
    answered_at: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class ClaimedEvent:
    """A row of the queue that a worker has claimed.

    JSON and times are converted on access, because most handlers use few of these fields.
    """

    claim: Claim
    row_id: int
    event_id: uuid.UUID
    type: str
    version: int
    payload_json: str | None
    headers_json: str | None
    key: str | None
    lane_id: int | None
    priority: int
    attempts: int
    crashes: int
    interruptions: int
    producer: str
    caused_by: uuid.UUID | None
    created_epoch: float
    due_epoch: float | None
    started_epoch: float
    deliveries_json: str | None
    errors_json: str | None
    #: The id of the event that a replay copied; None for an event that was published.
    replay_of: uuid.UUID | None = None
    #: The only handler that receives the event; None for all handlers.
    only_handler: str | None = None
    #: Whether the first start of a handler was counted under this claim.
    is_started: bool = False

    @property
    def is_new(self) -> bool:
        """Whether the row has no record of an earlier attempt. Nearly all events are new."""
        recorded = self.deliveries_json or self.errors_json
        return not (recorded or self.crashes or self.interruptions)

    @property
    def is_suspect(self) -> bool:
        """Whether an earlier claim ended without a result, so that the event must run alone."""
        return bool(self.crashes or self.interruptions)

    @property
    def created_at(self) -> datetime:
        return datetime.fromtimestamp(self.created_epoch, UTC)

    @property
    def processing_started_at(self) -> datetime:
        return datetime.fromtimestamp(self.started_epoch, UTC)

    def age(self, epoch: float) -> float:
        """Return the seconds from creation or due time, whichever is later, to ``epoch``."""
        since = max(self.created_epoch, self.due_epoch or 0.0)
        return max(0.0, epoch - since)

    def database_now(self) -> datetime:
        """Return the estimated database time: the time of the claim plus the seconds since then."""
        return datetime.fromtimestamp(self.database_epoch(), UTC)

    def database_epoch(self) -> float:
        return self.started_epoch + time.monotonic() - self.claim.answered_at
