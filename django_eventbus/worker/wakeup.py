"""Wake-ups of the dispatcher: ``Bell`` ends its wait, and ``Timing`` limits its wait."""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Iterable

FIRST_IDLE_WAIT = 0.02
SHORTEST_WAIT = 0.02
FALSE_ALARMS = 5
FALSE_ALARM_PAUSE = 0.02
OUTAGE_WAIT = 0.2
LONGEST_OUTAGE_WAIT = 10.0


class Bell:
    """Wakes the dispatcher.

    A signal handler may call ``ring``, because ``SimpleQueue.put`` is reentrant. An Event cannot be
    used, because ``Event.set`` is not reentrant.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[bool] = queue.SimpleQueue()
        #: Whether a ring since the last ``take_rings`` was for new events. Only the dispatcher's
        #: thread uses this flag.
        self.rang_for_events = False

    def ring(self, *, new_events: bool = False) -> None:
        """Wake the dispatcher; ``new_events`` means that there may be new events."""
        self._rings.put(new_events)

    def ring_for_events(self) -> None:
        self.ring(new_events=True)

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for a ring, and return whether there was one."""
        with contextlib.suppress(queue.Empty):
            self.rang_for_events |= self._rings.get(timeout=seconds)
            return True
        return False

    def take_rings(self) -> bool:
        """Return whether there may be new events since the last call, and discard all rings.

        Call this before a claim. After a claim, this method could discard the ring of an event that
        the claim did not see.
        """
        while not self._rings.empty():
            self.rang_for_events |= self._rings.get()
        new_events, self.rang_for_events = self.rang_for_events, False
        return new_events


def jittered(seconds: float) -> float:
    """Return a slightly shorter, random time.

    Otherwise workers that were started together would all query at the same time.
    """
    return seconds * random.uniform(0.75, 1.0)


class Timing:
    """The times that the dispatcher waits if there is no work, or during a database outage."""

    def __init__(self, poll_interval: float, *, reports_wakeups: bool) -> None:
        self._poll_interval = poll_interval
        #: Whether the database notifies this process. If not, the dispatcher polls more often.
        self._reports_wakeups = reports_wakeups
        self._idle_wait = FIRST_IDLE_WAIT
        self._fruitless = self._false_alarms = 0
        self._outage_wait = OUTAGE_WAIT

    def delivered(self) -> None:
        """Reset the waits after a delivery, because more events may follow soon.

        The last wake-up was not spurious, so the count of spurious wake-ups starts at zero again.
        """
        self._idle_wait = FIRST_IDLE_WAIT
        self._fruitless = self._false_alarms = 0

    def found_nothing(self) -> None:
        """Count a claim that found no event."""
        self._fruitless += 1

    def idle_wait(self, due: Iterable[float | None]) -> float:
        """Return how many seconds to wait for a wake-up.

        ``due`` contains the seconds until each duty, or None for an unknown time.
        """
        longest, self._fruitless = self._poll_interval, 0
        if not self._reports_wakeups:
            longest = min(longest, self._idle_wait)
            self._idle_wait *= 1.5
        longest = jittered(longest)
        soonest = min((each for each in due if each is not None), default=longest)
        return min(longest, max(soonest, SHORTEST_WAIT))

    def wait_for_locks(self) -> float:
        """Return the seconds until the next claim, while other transactions lock the ready events.

        The wait grows with each claim that finds no event.
        """
        wait = FIRST_IDLE_WAIT * 1.5 ** min(self._fruitless, 20)
        return jittered(min(wait, self._poll_interval))

    def pause_after_false_alarms(self) -> None:
        """Sleep after several spurious wake-ups: any database role may send NOTIFY."""
        if self._false_alarms >= FALSE_ALARMS:
            time.sleep(FALSE_ALARM_PAUSE)

    def woke_up(self, *, for_events: bool) -> None:
        self._false_alarms = self._false_alarms + 1 if for_events else 0

    def outage_wait(self) -> float:
        """Return the seconds until the next attempt after a database error; longer each time."""
        wait, self._outage_wait = (
            self._outage_wait,
            min(self._outage_wait * 2, LONGEST_OUTAGE_WAIT),
        )
        return wait

    def outage_is_over(self) -> None:
        self._outage_wait = OUTAGE_WAIT
