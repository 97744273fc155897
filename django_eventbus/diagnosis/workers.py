"""Checks of the workers: EB001 to EB009."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from django.utils import timezone

from django_eventbus.conf import settings
from django_eventbus.diagnosis.examination import Bus, Result, check, fail, listed, ok, warn
from django_eventbus.flow.fleet import digest_of, known_here
from django_eventbus.models import EventWorker
from django_eventbus.status import in_words
from django_eventbus.worker import deployment

#: The check of clocks warns above this difference in seconds.
SKEW = 2.0
#: The check of clocks fails above this difference in seconds.
LARGE_SKEW = 60.0

RESTART = "Restart these workers with the current code: {}."


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
    since = f" for {in_words((bus.now - max(seen)).total_seconds())}" if seen else ""
    yield fail(f"no worker has renewed its registration{since}", fix="manage.py run_event_worker")


@check(
    "EB002",
    title="Queues without a worker",
    symptom="Events of one queue wait, while events of other queues are handled.",
    cause="All live workers were started with --queues, and none of them names this queue; or the "
    "queue was added to QUEUES after the workers had started.",
    fix="Start a worker with --queues and the name of the queue, or restart the workers without "
    "--queues: they then serve all queues.",
    reads_status_only=True,
    is_a_problem=True,
)
def unserved_queues(bus: Bus) -> Iterator[Result]:
    served = {queue for each in bus.status.living for queue in each.queues}
    unserved = [queue for queue in settings.QUEUES if queue not in served]
    if settings.CELERY_DRAIN or not unserved:
        yield ok(f"{len(settings.QUEUES)} queues are served")
        return
    for queue in unserved:
        yield fail(
            f"no live worker serves the queue {queue}",
            fix=f"manage.py run_event_worker --queues {queue}",
        )


@check(
    "EB003",
    title="Workers with other handlers",
    symptom="Some events run a handler that the current code does not have, or wait for a handler "
    "that only some workers have.",
    cause="Workers of an earlier deployment are still running, or not all workers use the same "
    "INSTALLED_APPS. A worker leaves an event to a worker that has more handlers for it, so such "
    "events take longer.",
    fix="Restart the workers that have other handlers. Deploy the same code to all of them.",
    reads_status_only=True,
)
def other_handlers(bus: Bus) -> Iterator[Result]:
    here = known_here()
    own = digest_of(here)
    noted = [each for each in bus.status.living if each.handlers_digest]
    others = [each for each in noted if each.handlers_digest != own]
    if not others:
        yield ok(f"{len(noted)} live workers have the handlers of this process")
        return
    theirs = {name for each in others for name in each.handlers or {}}
    lacking = {name for each in others for name in here.keys() - (each.handlers or {}).keys()}
    facts = [
        f"{len(others)} of {len(noted)} live workers have other handlers than this process",
        *([f"only they have {listed(theirs - here.keys())}"] if theirs - here.keys() else []),
        *([f"they lack {listed(lacking)}"] if lacking else []),
    ]
    yield warn("; ".join(facts), fix=RESTART.format(_names(others)))


@check(
    "EB004",
    title="Workers with other versions",
    symptom="Errors about missing columns or unknown values appear in only some workers, for "
    "example after an upgrade.",
    cause="Workers that run another version of the package, of Django or of Python than this "
    "process are still running.",
    fix="Restart these workers in the environment of the current deployment.",
    reads_status_only=True,
)
def other_versions(bus: Bus) -> Iterator[Result]:
    own = deployment.version()
    noted = [each for each in bus.status.living if each.version]
    others = [each for each in noted if each.version != own]
    if not others:
        yield ok(f"{len(noted)} live workers have version {own}")
        return
    versions = listed({each.version for each in others}, separator="; ")
    yield warn(
        f"{len(others)} of {len(noted)} live workers have another version than this process "
        f"({versions} instead of {own})",
        fix=RESTART.format(_names(others)),
    )


@check(
    "EB005",
    title="Workers with other settings",
    symptom="A changed setting of EVENTBUS has no effect, or only some workers obey it.",
    cause="Workers read the settings when they start. These workers were started before the "
    "setting was changed, or with another settings module or environment.",
    fix="Restart these workers with the settings of this process. Settings that may differ "
    "between processes, such as BATCH_SIZE, are not compared.",
    reads_status_only=True,
)
def other_settings(bus: Bus) -> Iterator[Result]:
    own = deployment.settings_digests()
    noted = [each for each in bus.status.living if each.version]
    others = [each for each in noted if each.settings_digests != own]
    if not others:
        yield ok(f"{len(noted)} live workers have the settings of this process")
        return
    names = {name for each in others for name in _differing(own, each.settings_digests)}
    yield warn(
        f"{len(others)} of {len(noted)} live workers have other values than this process of "
        f"EVENTBUS {listed(names)}",
        fix=RESTART.format(_names(others)),
    )


@check(
    "EB006",
    title="Clock skew",
    symptom="Delayed events run too early or too late, and ages in logs and in the admin are "
    "wrong or negative.",
    cause="The clock of this machine and the clock of the database server differ. The bus itself "
    "uses only the clock of the database, but your code computes at= and compares times with the "
    "clock of its own machine.",
    fix="Synchronize the clocks of all machines, for example with chrony or systemd-timesyncd.",
)
def clock_skew(bus: Bus) -> Iterator[Result]:
    before = timezone.now()
    database = bus.store.read_clock()
    after = timezone.now()
    if before <= database <= after:
        skew = 0.0
    else:
        # The smaller difference: the round trip takes time too.
        skew = min((database - before).total_seconds(), (database - after).total_seconds(), key=abs)
    direction = "ahead of" if skew > 0 else "behind"
    text = f"the clock of the database is {in_words(abs(skew))} {direction} this machine's clock"
    if abs(skew) <= SKEW:
        yield ok(text if abs(skew) >= 0.001 else "the clocks agree")
    elif abs(skew) <= LARGE_SKEW:
        yield warn(text, fix="Enable time synchronization: timedatectl set-ntp true")
    else:
        yield fail(text, fix="Enable time synchronization: timedatectl set-ntp true")


@check(
    "EB007",
    title="Workers without a heartbeat",
    symptom="Events stay in the state running although no handler runs.",
    cause="A worker process was killed, its machine is down, or it cannot reach the database. Live "
    "workers take over the events of such a worker ABANDON_AFTER seconds after its last heartbeat.",
    fix="Read the log of this worker and of its machine. Start another worker if none is running.",
    reads_status_only=True,
    is_a_problem=True,
)
def lost_workers(bus: Bus) -> Iterator[Result]:
    lost = [each for each in bus.status.workers if each.expires_at <= bus.now]
    if not lost:
        yield ok("all registered workers send heartbeats")
        return
    silent = in_words((bus.now - min(each.renewed_at for each in lost)).total_seconds())
    yield warn(
        f"{len(lost)} registered workers have sent no heartbeat for up to {silent}",
        fix=f"Read the logs of {_names(lost)}.",
    )


def _differing(own: dict[str, str], theirs: dict[str, str]) -> Iterable[str]:
    return {name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name)}


def _names(workers: Collection[EventWorker]) -> str:
    return listed({str(each) for each in workers})
