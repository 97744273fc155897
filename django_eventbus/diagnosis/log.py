"""Checks of dead letters and of the log: EB020 to EB022."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from django_eventbus.diagnosis.examination import Bus, Result, check, fail, listed, ok, warn
from django_eventbus.status import in_words, shown_count

#: The age from which a dead letter counts as forgotten.
OLD_DEAD = timedelta(days=14)
#: The age from which a completed event counts as old.
OLD_COMPLETED = timedelta(days=90)
#: A log that contains this many old completed events is probably never purged.
MANY_COMPLETED = 100_000
#: Old dead letters are counted up to this number.
COUNTED_DEAD = 10_000


@check(
    "EB020",
    title="Old dead letters",
    symptom="The number of dead letters only grows, and new ones are hard to find among the old.",
    cause="These dead letters were neither retried nor purged. Their payloads, which may contain "
    "personal data, stay in the log.",
    fix="Retry those that matter (manage.py dead_events retry) and purge the others (manage.py "
    "purge_events --status dead --older-than 14d).",
)
def old_dead_letters(bus: Bus) -> Iterator[Result]:
    old = bus.store.dead.filter(finished_at__lt=bus.now - OLD_DEAD)
    count = old.values("id")[: COUNTED_DEAD + 1].count()
    if not count:
        yield ok(f"no dead letter is older than {OLD_DEAD.days} days")
        return
    yield warn(
        f"{shown_count(count, up_to=COUNTED_DEAD)} dead letters are older than "
        f"{OLD_DEAD.days} days",
        fix="manage.py dead_events list\n"
        f"manage.py purge_events --status dead --older-than {OLD_DEAD.days}d",
    )


@check(
    "EB021",
    title="Events that cannot be read or settled",
    symptom="An event is claimed again and again without a result, or waits with the error of "
    "a worker instead of a handler.",
    cause="The claim of the event ended without a result: the worker disappeared, the row has a "
    "format that this version cannot read, or the database refuses the result. After "
    "MAX_INTERRUPTIONS such claims the event becomes a dead letter.",
    fix="Read the errors of the event in the admin. If a newer version wrote the row, upgrade the "
    "workers; if the result is refused, correct the cause that the error names.",
)
def interrupted_events(bus: Bus) -> Iterator[Result]:
    found = [event for event in bus.oldest_queued if event.interruptions]
    if not found:
        yield ok("no queued event had an interrupted claim")
        return
    types = Counter(event.type for event in found)
    # More than one interruption means that the event itself may be the reason.
    again = [event for event in found if event.interruptions > 1]
    text = f"{len(found)} queued events had interrupted claims, {len(again)} of them repeatedly"
    yield (fail if again else warn)(
        f"{text}: {listed(types)}",
        fix="Read the errors of the event: "
        + ", ".join(str(event.event_id) for event in (again or found)[:3]),
    )


@check(
    "EB022",
    title="Log that is never purged",
    symptom="The table django_eventbus_eventlog, backups and the admin's searches of the log get "
    "larger and slower every week.",
    cause="Every event that ended stays in the log until it is purged, and no purge runs.",
    fix="Run manage.py purge_events --older-than 30d --yes every day, with cron or with a schedule "
    "of the bus.",
)
def unpurged_log(bus: Bus) -> Iterator[Result]:
    # Both queries read the index of namespace and finished_at.
    with bus.store.reading_by_index():
        ended = bus.store.completed.order_by("finished_at")
        oldest = ended.values_list("finished_at", flat=True).first()
        old = ended.filter(finished_at__lt=bus.now - OLD_COMPLETED)
        count = old.values("id")[: MANY_COMPLETED + 1].count()
    age = (
        "the log is empty"
        if oldest is None
        else (f"the oldest completed event is {in_words((bus.now - oldest).total_seconds())} old")
    )
    if count < MANY_COMPLETED:
        yield ok(age)
        return
    yield warn(
        f"{age}, and {shown_count(count, up_to=MANY_COMPLETED)} completed events are older than "
        f"{OLD_COMPLETED.days} days",
        fix="manage.py purge_events --older-than 30d --yes",
    )
