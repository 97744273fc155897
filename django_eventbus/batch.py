"""The events of one claim on their way, and what they came to."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, fields

from django_eventbus.events import ClaimedEvent
from django_eventbus.progress import Progress
from django_eventbus.store import Finished, Held, Postponed, Settlement


@dataclass(slots=True)
class Tally:
    """What a batch came to: events that ended, that wait for a retry, attempts that failed …"""

    handled: int = 0
    postponed: int = 0
    failed: int = 0
    dead: int = 0
    lost: int = 0

    def add(self, other: Tally) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class Batch:
    """The events of one claim, and what became of them so far."""

    token: uuid.UUID
    queue: str
    tally: Tally = field(default_factory=Tally)
    #: Events with handlers that want no transaction, ready to be given to them.
    outside: list[Progress] = field(default_factory=list)
    unstarted: list[Progress] = field(default_factory=list)
    #: Lanes held, and for how many seconds those are blocked whose head failed.
    lanes: frozenset[int] = frozenset()
    blocked: dict[int, float] = field(default_factory=dict)
    #: Nothing more is begun. For good: what comes later must not overtake what was passed over.
    halted: bool = False

    def next_wave(self, waiting: list[Progress]) -> tuple[list[Progress], list[Progress]]:
        """Of each lane, events up to the first that cannot be finished inside a group."""
        wave: list[Progress] = []
        later: list[Progress] = []
        busy: set[int] = set()
        for each in waiting:
            lane = each.event.lane_id
            if lane is None:
                wave.append(each)
                continue
            if lane in busy:
                later.append(each)
                continue
            wave.append(each)
            if each.outside or each.event.crashes:
                busy.add(lane)
        return wave, later

    def is_blocked(self, progress: Progress) -> bool:
        return progress.event.lane_id in self.blocked

    def note(self, event: ClaimedEvent, settlement: Settlement) -> None:
        """An event that goes back to the queue holds up the rest of its lane; a dead one may."""
        lane = event.lane_id
        if lane is None:
            return
        if isinstance(settlement, Postponed | Held):
            self.blocked[lane] = settlement.delay
        elif isinstance(settlement, Finished) and settlement.blocks_lane is not None:
            self.blocked[lane] = 0.0

    def hold_up(self, progress: Progress) -> None:
        """Nobody here knows what became of it, so nothing of its lane may follow it."""
        if progress.event.lane_id is not None:
            self.blocked.setdefault(progress.event.lane_id, 0.0)
