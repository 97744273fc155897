"""Checks of the workers: EB001 to EB009."""

from __future__ import annotations

from collections.abc import Iterator

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import Bus, Result, check, fail, ok
from django_eventbus.status import in_words


@check(
    "EB001",
    title="No worker is running",
    symptom="Events are published, but no handler runs, and the number of pending events grows.",
    cause="No process runs run_event_worker, or no worker has renewed its registration for "
    "ABANDON_AFTER seconds, for example because it cannot reach the database.",
    fix="Start manage.py run_event_worker under a supervisor such as systemd, and read the log of "
    "the workers that ended.",
    reads_status_only=True,
    is_a_problem=True,
)
def no_worker(bus: Bus) -> Iterator[Result]:
    living = len(bus.status.living)
    if living or settings.CELERY_DRAIN:
        yield ok(f"{living} live workers")
        return
    seen = [each.renewed_at for each in bus.status.workers]
    since = f" since {in_words((bus.now - max(seen)).total_seconds())}" if seen else ""
    yield fail(f"no worker has renewed its registration{since}", fix="manage.py run_event_worker")
