"""Marks: what must happen once has a row, and a unique index decides between rivals."""

from __future__ import annotations

import uuid
from datetime import timedelta

from django.db.models import Q, QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import EventMark
from django_eventbus.store.rows import Rows, retried

FORGET_CHUNK = 1000
#: One more after a rival's mark was seen to go, and one for luck.
LOOKS = 3

#: The scope of keys that publishers give; a handler's scope is its name, which is never empty.
PUBLISHED = ""


class Marks(Rows):
    """Part of the caller's transaction: what it does and its mark are committed together."""

    def standing_mark(self, scope: str, key: str) -> EventMark | None:
        lasting = Q(expires_at__isnull=True) | Q(expires_at__gt=self.now)
        return self._marks_of(scope, key).filter(lasting).first()

    def take_mark(
        self, scope: str, key: str, *, event_id: uuid.UUID, keep: timedelta | None
    ) -> EventMark | None:
        """Make the mark, for good or for a while; return the one that stands if there is one.

        Waits for a rival that has made it and not yet committed.
        """
        expires_at = None if keep is None else self.after(keep.total_seconds())
        # What has expired is updated, never replaced, and an insert comes only where nothing was
        # seen: on MariaDB a refused insert leaves a shared lock, and two that then write deadlock.
        for _ in range(LOOKS):
            if standing := self.standing_mark(scope, key):
                return standing
            expired = self._marks_of(scope, key).filter(expires_at__lte=self.now)
            if expired.exists():
                won = bool(expired.update(event_id=event_id, expires_at=expires_at))
            else:
                won = self._insert_mark(scope, key, event_id, expires_at)
            if won:
                return None
        # A transaction that sees only the past (REPEATABLE READ) is refused by what it cannot see.
        return EventMark(scope=scope, key=key, event_id=event_id)

    def _marks_of(self, scope: str, key: str) -> QuerySet[EventMark]:
        return self.marks.filter(scope=scope, key=key)

    def _insert_mark(self, scope: str, key: str, event_id: uuid.UUID, expires_at: object) -> bool:
        new = EventMark(namespace=settings.NAMESPACE, scope=scope, key=key, event_id=event_id)
        new.expires_at = expires_at  # type: ignore[assignment]
        self.marks.bulk_create([new], ignore_conflicts=True)
        return self.marks.filter(pk=new.pk).exists()

    @retried
    def forget_marks(self) -> int:
        """Delete marks whose time is over, some at a time. Every worker does it."""
        expired = self.marks.filter(expires_at__lte=self.now)
        if not expired.exists():
            return 0
        with self.atomic():
            oldest = self.locked(expired.order_by("expires_at"))
            ids = list(oldest.values_list("pk", flat=True)[:FORGET_CHUNK])
            deleted, _ = self.marks.filter(pk__in=ids).delete()
        return deleted
