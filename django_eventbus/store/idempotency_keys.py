"""Idempotency keys: one row, under a unique index, for each effect that must happen once."""

from __future__ import annotations

import uuid
from datetime import timedelta

from django.db.models import Q, QuerySet

from django_eventbus.conf import settings
from django_eventbus.models import IdempotencyKey
from django_eventbus.store.rows import Rows, retried

DELETE_CHUNK = 1000
#: How many times ``add_key`` tries to store a key. A try fails if another transaction commits the
#: same key, or changes or deletes the row of the expired key, between the read and the write. The
#: next try then reads the key again.
ATTEMPTS = 3

#: The scope of ``dedup_key``. The scope of a handler is its name, which is never empty.
PUBLISHED = ""


class IdempotencyKeys(Rows):
    """Keys are written in the caller's transaction, so the key and its effect commit together."""

    def find_key(self, scope: str, key: str) -> IdempotencyKey | None:
        """Return the key unless it has expired."""
        lasting = Q(expires_at__isnull=True) | Q(expires_at__gt=self.now)
        return self._keys_of(scope, key).filter(lasting).first()

    def add_key(
        self, scope: str, key: str, *, event_id: uuid.UUID, keep: timedelta | None
    ) -> IdempotencyKey | None:
        """Store a key and return None; if the key exists already, return the existing key.

        The key is kept for the time of ``keep``, or forever if ``keep`` is None. If another
        transaction has stored the key and has not committed yet, the method waits for its end.
        """
        expires_at = None if keep is None else self.after(keep.total_seconds())
        # On MariaDB a refused INSERT leaves a shared lock, and two transactions with this lock
        # deadlock when they write. So a key is inserted only if the read found none, and the row
        # of an expired key is updated.
        for _ in range(ATTEMPTS):
            if existing := self.find_key(scope, key):
                return existing
            expired = self._keys_of(scope, key).filter(expires_at__lte=self.now)
            if expired.exists():
                won = bool(expired.update(event_id=event_id, expires_at=expires_at))
            else:
                won = self._insert_key(scope, key, event_id, expires_at)
            if won:
                return None
        # At REPEATABLE READ the unique index may refuse the insert because of a key that the
        # snapshot hides. The key exists, although this transaction cannot read it.
        return IdempotencyKey(scope=scope, key=key, event_id=event_id)

    def _keys_of(self, scope: str, key: str) -> QuerySet[IdempotencyKey]:
        return self.idempotency_keys.filter(scope=scope, key=key)

    def _insert_key(self, scope: str, key: str, event_id: uuid.UUID, expires_at: object) -> bool:
        new = IdempotencyKey(namespace=settings.NAMESPACE, scope=scope, key=key, event_id=event_id)
        new.expires_at = expires_at  # type: ignore[assignment]
        self.idempotency_keys.bulk_create([new], ignore_conflicts=True)
        return self.idempotency_keys.filter(pk=new.pk).exists()

    @retried
    def delete_expired_keys(self) -> int:
        """Delete a chunk of the expired keys; return how many. Every worker calls this method."""
        expired = self.idempotency_keys.filter(expires_at__lte=self.now)
        if not expired.exists():
            return 0
        with self.atomic():
            oldest = self.locked(expired.order_by("expires_at"))
            ids = list(oldest.values_list("pk", flat=True)[:DELETE_CHUNK])
            deleted, _ = self.idempotency_keys.filter(pk__in=ids).delete()
        return deleted
