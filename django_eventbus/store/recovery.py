"""Registrations of workers, and recovery of the events of dead workers.

A claim is valid as long as its worker is registered. Each worker renews its registration, not the
rows of its events.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from django.db.models import Case, F, IntegerField, Q, QuerySet, Value, When

from django_eventbus.conf import settings
from django_eventbus.errors.failpoints import reached
from django_eventbus.errors.failures import with_record
from django_eventbus.models import EventWorker, QueuedStatus
from django_eventbus.store.lanes import Lanes
from django_eventbus.store.rows import UNCLAIMED, retried
from django_eventbus.store.waits import AT_ONCE

WORKERS_PER_RECOVERY = 10
#: The expiry of a registration that is never renewed, such as the registration of a test.
NEVER = datetime(9000, 1, 1, tzinfo=UTC)


class Charge(Enum):
    """The counter that is incremented when a claim ends without a result.

    It is incremented only for blamed events: events whose handler was, or may have been, running.
    """

    CRASH = "crashes"
    INTERRUPTION = "interruptions"
    #: No counter changes, for example because the worker was stopped on request. Blamed events
    #: still get a record of the error.
    NOTHING = ""

    def counted(self) -> dict[str, Any]:
        return {self.value: F(self.value) + 1} if self.value else {}


class Recovery(Lanes):
    """Every worker does recovery, as part of its upkeep. There is no leader."""

    def register(self, worker: EventWorker, *, expires: bool = True) -> None:
        worker.namespace = settings.NAMESPACE
        with self.atomic():
            worker.expires_at = self.after(settings.ABANDON_AFTER) if expires else NEVER
            worker.save(force_insert=True, using=self.using)

    def note_pid(self, worker: EventWorker) -> None:
        self.workers.filter(pk=worker.pk).update(pid=worker.pid)

    def note_handlers(
        self, worker_id: uuid.UUID, handlers: dict[str, list[str]], digest: str
    ) -> None:
        """Store the handlers of a worker, for other workers to read."""
        self.workers.filter(pk=worker_id).update(handlers=handlers, handlers_digest=digest)

    def handlers_of_others(self, worker_id: uuid.UUID, *, own: str) -> list[tuple[str, list[str]]]:
        """Return (digest of handlers, queues) of live workers whose digest differs from ``own``."""
        others = self.workers.filter(expires_at__gt=self.now).exclude(pk=worker_id)
        rows = others.exclude(handlers_digest__in=("", own))
        return list(rows.values_list("handlers_digest", "queues"))

    def handlers_by_digest(self, digests: Collection[str]) -> dict[str, dict[str, list[str]]]:
        rows = self.workers.filter(handlers_digest__in=list(digests))
        found = rows.values_list("handlers_digest", "handlers")
        return {digest: handlers or {} for digest, handlers in found}

    def renew(
        self, worker_ids: Collection[uuid.UUID], *, busy: Mapping[uuid.UUID, int] | None = None
    ) -> set[uuid.UUID]:
        """Renew the registrations of these workers; return the ids that are still registered.

        ``busy`` is the number of running handlers of each worker.
        """
        mine = self.workers.filter(pk__in=list(worker_ids))
        changes: dict[str, Any] = {"expires_at": self.after(settings.ABANDON_AFTER)}
        if busy:
            counts = (When(pk=each, then=Value(number)) for each, number in busy.items())
            changes["busy"] = Case(*counts, default=F("busy"), output_field=IntegerField())
        renewed = mine.update(renewed_at=self.now, **changes)
        reached("renew.sent")
        if renewed:
            return set(mine.values_list("pk", flat=True))
        return set()

    def dismiss(self, worker_id: uuid.UUID) -> int:
        """Unregister a worker that ended normally; release its claims without a charge."""
        return self.recover_worker(worker_id, blamed=(), error={}, charge=Charge.NOTHING)

    def unregister(self, worker_id: uuid.UUID) -> None:
        """Delete the registration of a worker that has no claims any more."""
        self.workers.filter(pk=worker_id).delete()

    def claims_of(self, worker_id: uuid.UUID) -> set[uuid.UUID]:
        """Return the tokens of all claims of this worker. The query scans the whole queue."""
        held = (rows.filter(claimed_by=worker_id) for rows in (self.queued, self.lanes))
        tokens = (rows.values_list("claim_token", flat=True) for rows in held)
        return {token for each in tokens for token in each if token is not None}

    def suspects_of(self, worker_id: uuid.UUID) -> set[int]:
        found = self.workers.filter(pk=worker_id).values_list("suspects", flat=True).first()
        return set(found or ())

    def suspect(self, worker_id: uuid.UUID, row_ids: Sequence[int]) -> None:
        """Store the row ids of the suspects that a worker runs (see ``delivery.suspects``).

        If the worker dies, these events are charged.
        """
        self.workers.filter(pk=worker_id).update(suspects=list(row_ids))

    @retried
    def recover(self) -> int:
        """Release the events of workers whose registration has expired; return how many.

        Workers call this at most once a second, and only if ``attention`` found an expired
        registration.
        """
        expired = self.workers.filter(expires_at__lt=self.now)
        if not expired.exists():
            return 0
        recovered = 0
        with self.atomic():
            for worker in list(self.locked(expired)[:WORKERS_PER_RECOVERY]):
                recovered += self._release_claims(
                    Q(claimed_by=worker.pk),
                    blamed=set(worker.suspects),
                    error=_lost(f"worker {worker} ({worker.pk}) did not renew its registration"),
                )
                # A row that another transaction had locked was skipped, so it is still claimed. The
                # registration then stays, so that the next recovery finds the row.
                if not self.queued.filter(claimed_by=worker.pk).exists():
                    worker.delete(using=self.using)
        return recovered

    def recover_orphans(self) -> int:
        """Release events whose worker is not registered. The query scans the whole queue."""
        registered = EventWorker.objects.using(self.using).values("pk")
        orphaned = Q(claimed_by__isnull=False) & ~Q(claimed_by__in=registered)
        if not (self.queued.filter(orphaned).exists() or self.lanes.filter(orphaned).exists()):
            return 0
        with self.atomic():
            return self._release_claims(
                orphaned, blamed=(), error=_lost("the worker is not registered any more")
            )

    @retried
    def recover_worker(
        self,
        worker_id: uuid.UUID,
        *,
        blamed: Collection[int],
        error: dict[str, Any],
        charge: Charge = Charge.CRASH,
    ) -> int:
        """Release the claims of a worker that has ended; return how many events.

        Only the events in ``blamed``, which the worker was running, are charged. If ``blamed`` is
        empty, ``_release_claims`` decides which events are charged.
        """
        held = self.queued.filter(claimed_by=worker_id)
        with self.atomic():
            recovered = self._release_claims(
                Q(claimed_by=worker_id), blamed=blamed, error=error, charge=charge
            )
            # A row that another transaction had locked was skipped, so it is still claimed. The
            # registration then stays, so that recover() finds the row later.
            if not held.exists():
                self.workers.filter(pk=worker_id).delete()
        return recovered

    @retried
    def interrupt_claim(self, token: uuid.UUID, *, error: dict[str, Any]) -> int:
        """Release the remaining events of a claim after an error of the batch, not of one event.

        The method waits for locked rows. The worker stays registered, so no recovery would release
        a row that is skipped here.
        """
        with self.atomic():
            return self._release_claims(
                Q(claim_token=token), blamed=(), error=error, lock=self.waiting_lock
            )

    @retried
    def release_claim(self, token: uuid.UUID) -> int:
        """Release the remaining events of a claim uncharged. Locked events stay claimed."""
        with self.atomic():
            return self._release_claims(
                Q(claim_token=token), blamed=(), error={}, charge=Charge.NOTHING
            )

    def is_released(self, token: uuid.UUID) -> bool:
        """Return whether no event is claimed under this token. The query scans the whole queue."""
        return not self.queued.filter(claim_token=token).exists()

    def _release_claims(
        self,
        condition: Q,
        *,
        blamed: Collection[int],
        error: dict[str, Any],
        charge: Charge = Charge.CRASH,
        lock: Callable[[QuerySet[Any]], QuerySet[Any]] | None = None,
    ) -> int:
        """Release rows and lanes, and charge ``blamed``, the events whose handler was running.

        If no event is blamed, any event of the claim may have been running. So each event that is
        not yet a suspect is charged with an interruption and becomes a suspect. From then on, the
        event runs alone, and the worker records its id before it runs, so that the next crash can
        be attributed. Events that were suspects before are not charged: the worker had not recorded
        their ids, so they were not running.
        """
        held = self.queued.filter(condition, status=QueuedStatus.PROCESSING)
        if charge is not Charge.NOTHING and not blamed:
            charge = Charge.INTERRUPTION
            blamed = set(held.filter(crashes=0, interruptions=0).values_list("id", flat=True))
        # Events and lanes are read before they are locked. The columns of the condition have no
        # index, so a locking read on MariaDB would lock every row of the table.
        known = held.filter(id__in=list(held.values_list("id", flat=True))).order_by("id")
        rows = list(
            (lock or self.locked)(known).values_list("id", "claim_token", "attempts", "errors")
        )
        others = [row_id for row_id, *_ in rows if row_id not in blamed]
        self.queued.filter(condition, id__in=others).update(**UNCLAIMED, attempts=F("attempts") - 1)
        for row_id, token, attempt, errors in rows:
            if row_id in blamed:
                record = {**error, "attempt": attempt, "at": self.read_clock().isoformat()}
                self.queued.filter(id=row_id, claim_token=token).update(
                    **UNCLAIMED, **charge.counted(), errors=with_record(errors, record)
                )
        lanes = list(self.lanes.filter(condition).values_list("id", flat=True))
        self.lanes.filter(condition, id__in=lanes).update(
            claim_token=None, claimed_by=None, **self.lane_ready_after(AT_ONCE)
        )
        return len(rows)


def _lost(message: str) -> dict[str, Any]:
    return {"handler": "", "type": "WorkerLost", "message": message, "traceback": ""}
