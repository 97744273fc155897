"""The events of one claim, and the counts of their results."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Self

from django_eventbus.outcomes.event_run import EventRun
from django_eventbus.schema.claims import ClaimedEvent
from django_eventbus.schema.deliveries import RETRY
from django_eventbus.store import AT_ONCE, HandOff, Settlement, Wait


@dataclass(slots=True)
class Tally:
    """Counts of the results of a batch."""

    handled: int = 0
    postponed: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0
    #: Events that were returned to the queue before they were started.
    returned: int = 0
    #: Events of which no handler was allowed to run.
    held: int = 0

    def count(self, settlement: Settlement) -> None:
        self.handled += settlement.ends
        self.dead += settlement.is_dead
        self.postponed += settlement.counts_as == RETRY
        self.held += settlement.is_held

    def add(self, other: Tally) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Batch:
    """The events of one claim while they are delivered.

    The deques contain the events whose next handlers have not been started. The delivering thread
    takes events from the left. If the batch is slow, another thread may empty the deques at any
    time, to release the events. So take events only with ``take``: each pop is atomic, so no event
    goes to two threads.
    """

    token: uuid.UUID
    queue: str
    tally: Tally = field(default_factory=Tally)
    started: float = field(default_factory=time.monotonic)
    #: Events that no wave has selected yet (see ``begin_wave``).
    waiting: deque[EventRun] = field(default_factory=deque)
    #: Events of this wave that may share a transaction.
    grouped: deque[EventRun] = field(default_factory=deque)
    #: Events of this wave that must run alone, because an earlier claim ended without a result.
    suspects: deque[EventRun] = field(default_factory=deque)
    #: Events whose next handlers run outside of a transaction.
    outside: deque[EventRun] = field(default_factory=deque)
    #: Events that the delivering thread will return to the queue at the end of the batch.
    unstarted: list[ClaimedEvent] = field(default_factory=list)
    #: Ids of lanes with an event that is left to the next claim. All later events of such a lane
    #: are left to the next claim too.
    cut: set[int] = field(default_factory=set)
    #: Ids of the lanes of this claim.
    lanes: frozenset[int] = frozenset()
    #: Ids of lanes of which this batch starts no further event, and how long each lane waits after
    #: its release. These lanes need not be blocked lanes, which wait for an operator.
    blocked: dict[int, Wait] = field(default_factory=dict)
    #: The events that were handed off to another executor.
    handed_off: dict[HandOff, list[ClaimedEvent]] = field(default_factory=dict)
    #: Whether to start no further event of this batch. The flag is never reset: otherwise later
    #: events would overtake the events that were skipped.
    halted: bool = False

    @classmethod
    def of(cls, events: Sequence[ClaimedEvent]) -> Self:
        claim = events[0].claim
        lanes = frozenset(each.lane_id for each in events if each.lane_id is not None)
        return cls(token=claim.token, queue=claim.queue, lanes=lanes)

    def begin_wave(self) -> None:
        """Select the events of the next wave from ``waiting``.

        A batch is delivered in waves, so that the events of each lane are handled in order.
        An event that cannot finish inside a group is the last event of its lane in this wave.
        Later events of its lane wait for the next wave.
        """
        later: deque[EventRun] = deque()
        busy: set[int] = set()
        for each in take_all(self.waiting):
            lane = each.event.lane_id
            if lane is not None and lane in busy:
                later.append(each)
                continue
            (self.suspects if each.event.is_suspect else self.grouped).append(each)
            if lane is not None and (each.outside or each.event.is_suspect):
                busy.add(lane)
        self.waiting = later

    def next_is_isolated(self) -> bool:
        """Return whether the next event must not share its transaction with other events."""
        try:
            return self.grouped[0].isolated
        except IndexError:
            return False

    def cut_before(self, event: ClaimedEvent) -> bool:
        """Leave the event to the next claim if earlier events of its lane wait.

        Return whether the event is left to the next claim.
        """
        lane = event.lane_id
        if lane is None or all(each.event.lane_id != lane for each in self.waiting):
            return False
        self.cut.add(lane)
        self.unstarted.append(event)
        return True

    def take_unstarted(self) -> list[ClaimedEvent]:
        """Start no further event, and return all events that were not started."""
        self.halted = True
        places = (self.waiting, self.outside, self.suspects, self.grouped)
        return [each.event for place in places for each in take_all(place)]

    def is_blocked(self, run: EventRun) -> bool:
        return run.event.lane_id in self.blocked

    def note(self, event: ClaimedEvent, settlement: Settlement) -> None:
        """If the event stays in the queue or blocks its lane, start no later event of the lane."""
        if event.lane_id is not None and (wait := settlement.holds_lane) is not None:
            self.blocked.setdefault(event.lane_id, wait)

    def note_hand_off(self, event: ClaimedEvent, settlement: Settlement) -> None:
        """Remember a hand-off that was committed, so that its message is sent after the batch."""
        if settlement.hand_off is not None:
            self.handed_off.setdefault(settlement.hand_off, []).append(event)

    def block(self, event: ClaimedEvent, wait: Wait = AT_ONCE) -> None:
        """Start no later event of the lane, because this event has no known outcome yet."""
        if event.lane_id is not None:
            self.blocked.setdefault(event.lane_id, wait)

    def lost(self, event: ClaimedEvent) -> None:
        """Count a lost claim: another worker has the event, or the reply to a COMMIT was lost."""
        self.tally.lost += 1
        self.block(event)

    def run_outside(self, run: EventRun) -> None:
        """Let the event's remaining handlers run outside of a transaction.

        If the lane of the event is in ``blocked``, return the event to the queue instead.
        """
        if self.is_blocked(run):
            self.unstarted.append(run.event)
        else:
            self.outside.append(run)

    def lane_waits(self) -> dict[int, Wait]:
        """Return how long each lane waits after its release."""
        return {lane: self.blocked.get(lane, AT_ONCE) for lane in self.lanes}


def take(events: deque[EventRun]) -> EventRun | None:
    """Take the first event, or return None if the deque is empty.

    A check of the length would be useless: another thread may empty the deque after the check.
    """
    try:
        return events.popleft()
    except IndexError:
        return None


def take_all(events: deque[EventRun]) -> Iterator[EventRun]:
    while (run := take(events)) is not None:
        yield run
