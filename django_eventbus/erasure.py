"""Erase personal data from events in the queue and the log, including dead letters.

Rows are kept, so that counts and history stay correct. Erased values are replaced by ``TOMBSTONE``.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import takewhile
from typing import Any

from django.db.models import JSONField, Q, QuerySet
from django.db.models.fields.json import KeyTransform

from django_eventbus.models import EventFields, QueuedEvent, QueuedStatus
from django_eventbus.store import LOWEST_ID, Store, store_for

BATCH = 500
TOMBSTONE = "[erased]"
#: Shorter values, such as "7", are not replaced inside longer texts, because they would also match
#: unrelated text.
SHORTEST_SEARCHED = 4
#: Fields of error and edit records that may contain parts of a payload.
QUOTING = frozenset({"message", "traceback", "payload"})
#: The JSON columns with records about an event, for example its errors.
RECORDS = tuple(
    each.name
    for each in EventFields._meta.local_fields
    if isinstance(each, JSONField) and each.name not in ("payload", "headers")
)
_ABSENT: Any = object()

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Erased:
    """The numbers of events whose data was erased, or would be erased in a dry run."""

    queued: int = 0
    completed: int = 0
    dead: int = 0
    #: Events that were not erased, because a worker processes them or a transaction has locked
    #: them.
    skipped: int = 0

    @property
    def total(self) -> int:
        return self.queued + self.completed + self.dead


def erase(
    *,
    key: str | None = None,
    where: Mapping[str, Any] | None = None,
    only: Collection[str] = (),
    dry_run: bool = False,
    batch_size: int = BATCH,
    using: str | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Erased:
    """Erase the personal data of events, and return the number of events per table.

    Select events by their ``key``, or by fields of their payload: ``where={"customer.email":
    "ann@example.com"}``. Payload, headers, error texts and earlier payloads are erased completely;
    in the key and the ``dedup_key``, only the selected values are erased. If ``only`` is given
    (paths such as ``"customer.name"``), only these fields are erased, and copies of their values in
    other fields of the event.

    A queued event keeps its key until it has ended, because the key determines the order of
    handling. Each batch is a transaction, so do not call this function inside a transaction.
    """
    eraser = Eraser.of(key=key, where=where or {}, only=only)
    store, erased = store_for(using), Erased()
    # The queue is erased before the log. An event that ends in the meantime moves from the queue to
    # the log, where the later search finds it.
    tables = {"queued": store.queued, "completed": store.completed, "dead": store.dead}
    for name, rows in tables.items():
        for ids in _batches(eraser.candidates(rows), batch_size):
            changed, skipped = _erase_batch(store, rows, ids, eraser, dry_run=dry_run)
            counts = {name: getattr(erased, name) + changed, "skipped": erased.skipped + skipped}
            erased = replace(erased, **counts)
            progress(erased.total)
    return erased


def _batches(rows: QuerySet[Any], size: int) -> Iterator[list[int]]:
    ids, last = rows.order_by("id").values_list("id", flat=True), LOWEST_ID
    while batch := list(ids.filter(id__gt=last)[:size]):
        yield batch
        last = batch[-1]


def _erase_batch(
    store: Store, rows: QuerySet[Any], ids: list[int], eraser: Eraser, *, dry_run: bool
) -> tuple[int, int]:
    """Erase the data of a batch; return the numbers of changed and of skipped events."""
    if dry_run:
        meant = [row for row in rows.filter(id__in=ids) if eraser.changes(row)]
        held = sum(row.status == QueuedStatus.PROCESSING for row in meant)
        return len(meant) - held, held
    free, changed = store.rewrite(rows, ids, eraser.changes)
    others = rows.filter(id__in=[each for each in ids if each not in free])
    return changed, sum(bool(eraser.changes(row)) for row in others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Eraser:
    """The selection of events, and the fields to erase in them."""

    key: str | None
    where: Mapping[Path, tuple[Any, ...]] = field(default_factory=dict)
    only: tuple[Path, ...] = ()

    @classmethod
    def of(cls, *, key: str | None, where: Mapping[str, Any], only: Collection[str]) -> Eraser:
        if (key is None) == (not where):
            raise ValueError("select events by either key= or where=")
        if isinstance(only, str):
            raise ValueError(f"only= must be a list of paths, not {only!r}")
        spellings = {_path(name): _spellings(name, value) for name, value in where.items()}
        return cls(key=key, where=spellings, only=tuple(map(_path, only)))

    def candidates(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        """Return the events that may match the selection. ``fits`` makes the exact comparison.

        All edited events are included, because the query cannot compare their earlier payloads.
        """
        if self.key is not None:
            return rows.filter(key=self.key)
        chosen = Q()
        for number, (path, values) in enumerate(self.where.items()):
            name, known = f"erased_{number}", tuple(takewhile(_is_plain, path))
            if known:
                rows = rows.annotate(**{name: _transform(known)})
            if known == path:
                chosen &= reduce(operator.or_, (Q(**{name: value}) for value in values))
            elif known:
                chosen &= Q(**{f"{name}__isnull": False})
        return rows.filter(chosen | Q(edits__isnull=False)) if chosen else rows

    def fits(self, row: Any) -> bool:
        if self.key is not None:
            return bool(row.key == self.key)
        return any(
            all(_value(payload, path) in values for path, values in self.where.items())
            for payload in _payloads(row)
        )

    def changes(self, row: Any) -> dict[str, Any]:
        """Return the columns to change; empty if the event does not match or is already erased."""
        if not self.fits(row):
            return {}
        new = self._some_fields(row) if self.only else self._everything(row)
        if isinstance(row, QueuedEvent):
            # A queued event keeps its key, because the key determines the order of handling.
            new.pop("key")
            if new["dedup_key"] != row.dedup_key:
                new["dedup_key"] = f"{TOMBSTONE} {row.event_id}"  # The column must be unique.
        else:
            new.pop("dedup_key")
        return {name: value for name, value in new.items() if value != getattr(row, name)}

    def _everything(self, row: Any) -> dict[str, Any]:
        values = [self.key] if self.key is not None else sum(self.where.values(), ())
        return {
            "payload": None if row.payload is None else TOMBSTONE,
            "headers": row.headers and dict.fromkeys(row.headers, TOMBSTONE),
            **{name: _without_quotes(getattr(row, name)) for name in RECORDS},
            **_names_without(values, row),
        }

    def _some_fields(self, row: Any) -> dict[str, Any]:
        found = {path: [_value(each, path) for each in _payloads(row)] for path in self.only}
        values = [each for some in found.values() for each in some if each is not _ABSENT]
        texts = _searched(values)
        edits = [
            {**each, "payload": _without_fields(each["payload"], self.only)}
            for each in row.edits or []
        ]
        return {
            "payload": _without(_without_fields(row.payload, self.only), texts),
            "headers": _without(row.headers, texts),
            **{name: _without(getattr(row, name), texts) for name in RECORDS},
            "edits": _without(edits, texts) or row.edits,
            **_names_without(values, row),
        }


def _path(name: str) -> Path:
    parts = tuple(name.split("."))
    if not all(parts):
        raise ValueError(f"{name!r} is not a path such as 'customer.email'")
    return parts


def _spellings(name: str, value: Any) -> tuple[Any, ...]:
    """Return the value and, for a number, its other form: a payload may contain 7 or "7"."""
    if value is None or isinstance(value, dict | list | tuple):
        raise ValueError(
            f"{name} must be compared with a string, a number or a bool, not {value!r}"
        )
    if not isinstance(value, str):
        return (value, json.dumps(value))
    try:
        parsed = json.loads(value)
    except ValueError:
        return (value,)
    return (value, parsed) if isinstance(parsed, int | float) else (value,)


def _is_plain(part: str) -> bool:
    """Return whether each database reads this part of a path as a field name, not as an index."""
    return not part.isdecimal() and '"' not in part and "\\" not in part


def _transform(path: Path) -> Any:
    found: Any = "payload"
    for part in path:
        found = KeyTransform(part, found)
    return found


def _payloads(row: Any) -> list[Any]:
    """Return the payload of an event, and the payloads that its edits replaced."""
    return [row.payload, *(each["payload"] for each in row.edits or [])]


def _value(payload: Any, path: Path) -> Any:
    for part in path:
        if isinstance(payload, dict) and part in payload:
            payload = payload[part]
        elif isinstance(payload, list) and part.isdecimal() and int(part) < len(payload):
            payload = payload[int(part)]
        else:
            return _ABSENT
    return payload


def _without_fields(payload: Any, paths: Collection[Path]) -> Any:
    for path in paths:
        if _value(payload, path) is not _ABSENT:
            payload = _put_tombstone(payload, path)
    return payload


def _put_tombstone(payload: Any, path: Path) -> Any:
    if not path:
        return TOMBSTONE
    first, rest = path[0], path[1:]
    if isinstance(payload, dict):
        return {**payload, first: _put_tombstone(payload[first], rest)}
    index = int(first)
    return [*payload[:index], _put_tombstone(payload[index], rest), *payload[index + 1 :]]


def _without_quotes(records: Any) -> Any:
    """Erase the fields of error and edit records that may contain parts of a payload."""
    if isinstance(records, list):
        return [_without_quotes(each) for each in records]
    if not isinstance(records, dict):
        return records
    return {
        name: TOMBSTONE if name in QUOTING and value else _without_quotes(value)
        for name, value in records.items()
    }


def _searched(values: Collection[Any]) -> list[str]:
    """Return the texts to replace, longest first: a shorter text may be part of a longer one."""
    leaves = [leaf for value in values for leaf in _leaves(value)]
    texts = {each for each in leaves if isinstance(each, str) and len(each) >= SHORTEST_SEARCHED}
    return sorted(texts - {TOMBSTONE}, key=len, reverse=True)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _leaves(each)
    else:
        yield value


def _without(value: Any, texts: Collection[str]) -> Any:
    """Replace each of the texts by ``TOMBSTONE`` wherever it occurs in a JSON value."""
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, TOMBSTONE)
        return value
    if isinstance(value, list):
        return [_without(each, texts) for each in value]
    if isinstance(value, dict):
        return {_without(name, texts): _without(each, texts) for name, each in value.items()}
    return value


def _names_without(values: Collection[Any], row: Any) -> dict[str, str | None]:
    """Return the event's ``key`` and ``dedup_key``, with the erased values replaced."""
    whole, texts = {str(each) for each in values}, _searched(values)
    names = {"key": row.key, "dedup_key": getattr(row, "dedup_key", None)}
    return {
        name: TOMBSTONE if text in whole else _without(text, texts) for name, text in names.items()
    }
