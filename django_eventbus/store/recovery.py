"""Who is alive, and what becomes of the events of those who are not.

Claims are good as long as their worker is. Workers renew their own row, never the events'.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Any

from django.db.models import F, Q

from django_eventbus.conf import settings
from django_eventbus.failpoints import reached
from django_eventbus.models import EventWorker, QueuedStatus
from django_eventbus.store.rows import NEVER, UNCLAIMED, Rows, retried, unless_blocked

WORKERS_PER_RECOVERY = 10


class Recovery(Rows):
    """Every worker does it, on every poll: no leader, no reaper."""

    def register(self, worker: EventWorker, *, expires: bool = True) -> None:
        worker.namespace = settings.NAMESPACE
        with self.atomic():
            worker.expires_at = self.after(settings.ABANDON_AFTER) if expires else NEVER
            worker.save(force_insert=True, using=self.using)

    def note_pid(self, worker: EventWorker) -> None:
        self.workers.filter(pk=worker.pk).update(pid=worker.pid)

    def renew(self, worker_ids: Collection[uuid.UUID]) -> set[uuid.UUID]:
        """Prolong the claims of these workers; return those that are still registered."""
        mine = self.workers.filter(pk__in=list(worker_ids))
        renewed = mine.update(renewed_at=self.now, expires_at=self.after(settings.ABANDON_AFTER))
        reached("renew.sent")
        if renewed:
            return set(mine.values_list("pk", flat=True))
        return set()

    def dismiss(self, worker_id: uuid.UUID) -> int:
        """A worker has ended by itself: what it still held, if anything, returns uncharged."""
        return self.recover_worker(worker_id, blamed=(), error={}, crashed=False)

    def unregister(self, worker_id: uuid.UUID) -> None:
        """Forget a worker that holds nothing any more."""
        self.workers.filter(pk=worker_id).delete()

    def claims_of(self, worker_id: uuid.UUID) -> set[uuid.UUID]:
        """Tokens under which this worker holds events or lanes: a look at the whole queue."""
        held = (rows.filter(claimed_by=worker_id) for rows in (self.queued, self.lanes))
        tokens = (rows.values_list("claim_token", flat=True) for rows in held)
        return {token for each in tokens for token in each if token is not None}

    def suspects_of(self, worker_id: uuid.UUID) -> set[int]:
        found = self.workers.filter(pk=worker_id).values_list("suspects", flat=True).first()
        return set(found or ())

    def suspect(self, worker_id: uuid.UUID, row_ids: Sequence[int]) -> None:
        """Write down which events a worker runs that may kill it: only they are to blame then."""
        self.workers.filter(pk=worker_id).update(suspects=list(row_ids))

    @retried
    def recover(self) -> int:
        """Give the events of dead workers to the living. Every worker does it on every poll."""
        expired = self.workers.filter(expires_at__lt=self.now)
        if not expired.exists():
            return 0
        recovered = 0
        with self.atomic():
            for worker in list(self.locked(expired)[:WORKERS_PER_RECOVERY]):
                held = self.queued.filter(claimed_by=worker.pk)
                # A suspect runs under its name or not at all: unnamed, it did not do it.
                unknown = held.filter(crashes=0).values_list("id", flat=True)
                recovered += self._take_back(
                    Q(claimed_by=worker.pk),
                    blamed=set(worker.suspects or unknown),
                    error=_lost(f"worker {worker} ({worker.pk}) gave no sign of life"),
                )
                if not held.exists():
                    # Else somebody holds a lock on one of its rows: it is looked at again.
                    worker.delete(using=self.using)
        return recovered

    def recover_orphans(self) -> int:
        """The same for events whose worker's registration is gone: a look at the whole queue."""
        registered = EventWorker.objects.using(self.using).values("pk")
        orphaned = Q(claimed_by__isnull=False) & ~Q(claimed_by__in=registered)
        if not (self.queued.filter(orphaned).exists() or self.lanes.filter(orphaned).exists()):
            return 0
        with self.atomic():
            return self._take_back(
                orphaned, blamed=None, error=_lost("the registration of its worker is gone")
            )

    @retried
    def recover_worker(
        self,
        worker_id: uuid.UUID,
        *,
        blamed: Collection[int],
        error: dict[str, Any],
        crashed: bool = True,
    ) -> int:
        """A worker is known to have ended: blame what it was running, return the rest uncharged."""
        held = self.queued.filter(claimed_by=worker_id)
        with self.atomic():
            recovered = self._take_back(
                Q(claimed_by=worker_id), blamed=set(blamed), error=error, crashed=crashed
            )
            if not held.exists():
                # Else somebody holds a lock on one of its rows: its time will be over.
                self.workers.filter(pk=worker_id).delete()
        return recovered

    @retried
    def recover_claim(
        self, token: uuid.UUID, *, error: dict[str, Any], ids: Collection[int] | None = None
    ) -> int:
        """Take back what is still held under one claim (or some of it), and blame all of it."""
        held = Q(claim_token=token)
        with self.atomic():
            if ids is None:
                return self._take_back(held, blamed=None, error=error)
            return self._take_back_rows(held & Q(id__in=list(ids)), blamed=None, error=error)

    def _take_back(
        self,
        whose: Q,
        *,
        blamed: set[int] | None,
        error: dict[str, Any],
        crashed: bool = True,
    ) -> int:
        """Unclaim rows and lanes."""
        taken = self._take_back_rows(whose, blamed=blamed, error=error, crashed=crashed)
        self.lanes.filter(whose).update(
            claim_token=None, claimed_by=None, ready_at=unless_blocked(self.now)
        )
        return taken

    def _take_back_rows(
        self,
        whose: Q,
        *,
        blamed: set[int] | None,
        error: dict[str, Any],
        crashed: bool = True,
    ) -> int:
        """``blamed`` rows (None: all) are charged and get the error, the others are as before."""
        held = self.queued.filter(whose, status=QueuedStatus.PROCESSING)
        rows = list(self.locked(held).values_list("id", "claim_token", "attempts", "errors"))
        innocent = [row_id for row_id, *_ in rows if blamed is not None and row_id not in blamed]
        self.queued.filter(whose, id__in=innocent).update(**UNCLAIMED, attempts=F("attempts") - 1)
        for row_id, token, attempt, errors in rows:
            if blamed is None or row_id in blamed:
                record = {**error, "attempt": attempt, "at": self.read_clock().isoformat()}
                self.queued.filter(id=row_id, claim_token=token).update(
                    **UNCLAIMED,
                    crashes=F("crashes") + int(crashed),
                    errors=[*(errors or []), record],
                )
        return len(rows)

    @retried
    def release_claim(self, token: uuid.UUID) -> int:
        """Take back, uncharged, a claim whose answer was lost: nobody knows of its events."""
        with self.atomic():
            return self._take_back(Q(claim_token=token), blamed=set(), error={})


def _lost(message: str) -> dict[str, Any]:
    return {"handler": "", "type": "WorkerLost", "message": message, "traceback": ""}
