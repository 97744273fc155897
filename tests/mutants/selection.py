"""The modules that are mutated, and the tests that must fail on each database."""

from __future__ import annotations

PACKAGE = "django_eventbus"

#: The parts that ``--modules`` names: paths inside the package, a directory with all its modules.
PARTS: dict[str, tuple[str, ...]] = {
    "store": ("store",),
    "delivery": (
        "outcomes",
        "delivery/alone.py",
        "delivery/atomic.py",
        "delivery/batch.py",
        "delivery/call.py",
        "delivery/deliverer.py",
        "delivery/group.py",
        "delivery/grouped.py",
        "delivery/kills.py",
        "delivery/outside.py",
        "delivery/returning.py",
        "delivery/settling.py",
        "delivery/suspects.py",
    ),
    "flow": ("flow", "pauses.py", "breakers.py", "policies.py"),
    "worker": (
        "worker/claiming.py",
        "worker/dispatcher.py",
        "worker/health.py",
        "worker/registration.py",
        "worker/threads.py",
        "worker/upkeep.py",
        "worker/wakeup.py",
        "worker/worker.py",
        "delivery/deadlines.py",
        "delivery/event_loop.py",
    ),
}

#: Fast tests of the same part run first.
TESTS: dict[str, tuple[str, ...]] = {
    "store": (
        "tests/store",
        "tests/test_lanes.py",
        "tests/test_pauses.py",
        "tests/test_delivery.py",
        "tests/test_publishing.py",
        "tests/test_limits.py",
        "tests/test_dead_letters.py",
        "tests/test_schedules.py",
        "tests/test_status.py",
        "tests/test_retention.py",
        "tests/test_polling.py",
        "tests/test_queued.py",
        "tests/test_statistics.py",
        "tests/test_hand_off_claims.py",
        "tests/test_hand_off_status.py",
        "tests/integrations/test_django_triggers.py",
        "tests/concurrency/test_claims.py",
        "tests/concurrency/test_deadlocks.py",
        "tests/concurrency/test_duplicates.py",
        "tests/concurrency/test_limits.py",
    ),
    "delivery": (
        "tests/test_event_run.py",
        "tests/test_delivery.py",
        "tests/integrations/test_opentelemetry.py",
        "tests/test_quarantine.py",
        "tests/test_retries.py",
        "tests/test_lanes.py",
        "tests/test_pauses.py",
        "tests/test_signals.py",
        "tests/test_worker.py",
        "tests/test_statistics.py",
        "tests/integrations/test_task_executor.py",
        "tests/integrations/test_celery_executor.py",
        "tests/concurrency/test_deadlocks.py",
        "tests/faults/test_lost_answers.py",
        "tests/faults/test_lost_sessions.py",
    ),
    "flow": (
        "tests/test_policies.py",
        "tests/test_admission.py",
        "tests/test_breakers.py",
        "tests/test_pauses.py",
        "tests/store/test_flow_controls.py",
        "tests/test_fleet.py",
        "tests/test_signals.py",
        "tests/integrations/test_task_executor.py",
        "tests/integrations/test_celery_executor.py",
        "tests/commands",
        "tests/concurrency/test_flow_controls.py",
    ),
    "worker": (
        "tests/test_health.py",
        "tests/test_worker.py",
        "tests/test_deadlines.py",
        "tests/test_delivery.py",
        "tests/test_admission.py",
        "tests/test_lanes.py",
        "tests/test_schedules.py",
        "tests/concurrency/test_worker_process.py",
        "tests/faults/test_lost_answers.py",
        "tests/faults/test_lost_sessions.py",
        "tests/faults/test_signals.py",
    ),
}

#: Modules that only one database runs.
ONLY_ON = {
    "store/postgresql.py": "postgresql",
    "store/postgresql_settling.py": "postgresql",
    "store/sqlite.py": "sqlite",
    "store/mariadb.py": "mariadb",
}


def databases_for(path: str, chosen: list[str]) -> list[str]:
    """The chosen databases that run this module."""
    only = ONLY_ON.get(path)
    return [each for each in chosen if only in (None, each)]
