"""The network between workers and database blocks, drops and delays traffic (F18, F20, F23)."""

import signal
from functools import partial

import pytest
from django.db import connection

from django_eventbus.models import EventLog, EventWorker, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import impatient, invariants, journal
from tests.faults.seeds import seeded
from tests.faults.test_failpoints import drained
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]


def listens(link):
    return link.has_said("LISTEN")


def works(link):
    return not listens(link)


def listeners():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity "
            "WHERE datname = current_database() AND query ~ 'LISTEN|pg_listening_channels'"
            " AND pid <> pg_backend_pid()"
        )
        return [pid for (pid,) in cursor.fetchall()]


# -- F18: the listener alone


def handled(count, worker):
    eventually(lambda: EventLog.objects.count() == count, lambda: worker.log)


def test_a_listener_whose_session_is_terminated_reconnects(start_worker, proxy):
    """The poll interval is ten minutes, so only the listener can bring the second event."""
    worker = start_worker("--poll-interval", "600", env=proxy.environment)
    publish("fault.effect", 0)
    handled(1, worker)
    for n in range(1, 4):
        (before,) = eventually(listeners, lambda: worker.log)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_terminate_backend(%s)", [before])
        publish("fault.effect", n)
        handled(n + 1, worker)
        eventually(lambda old=before: set(listeners()) - {old}, lambda: worker.log)
    invariants.check()


def test_without_its_listener_a_worker_polls(start_worker, proxy):
    """Half open: the listener receives nothing more, and gets no error either."""
    worker = start_worker("--poll-interval", "0.5", env=proxy.environment)
    publish("fault.effect", 0)
    handled(1, worker)
    eventually(lambda: proxy.blackhole(listens, newcomers=False), lambda: worker.log)
    publish("fault.effect", 1)
    handled(2, worker)
    invariants.check()


@pytest.mark.parametrize("how", ["half open", "unlisten"])
def test_a_listener_detects_a_half_open_connection(start_worker, proxy, how):
    worker = start_worker("--poll-interval", "600", env=proxy.environment)
    publish("fault.effect", 0)
    handled(1, worker)
    (deaf,) = eventually(listeners, lambda: worker.log)
    if how == "half open":
        assert proxy.blackhole(listens, newcomers=False) == 1
    else:
        proxy.say(listens, "UNLISTEN *")
    eventually(lambda: set(listeners()) - {deaf}, lambda: worker.log)
    publish("fault.effect", 1)
    handled(2, worker)
    invariants.check()


# -- F20: a worker without its database


@pytest.mark.parametrize("handler", ["fault.wait", "fault.wait_outside"])
@pytest.mark.parametrize("forget", [False, True], ids=["comes back", "is forgotten"])
def test_a_disconnected_worker_stops_before_another_takes_over(
    start_worker, proxy, tmp_path, handler, forget
):
    notes = journal.HandlerJournal(tmp_path / "handlers")
    env = {journal.HANDLERS: str(notes.path)}
    go_on = tmp_path / "go_on"
    publish_many(((handler, {"go_on": str(go_on)}) for _ in range(3)), key="k")
    lonely = start_worker(env=env | proxy.environment | impatient.ENVIRONMENT)
    lost = lonely.wait_until_registered()
    starts = partial(runs, notes)
    eventually(lambda: starts() == 1, lambda: lonely.log)
    proxy.blackhole()
    other = start_worker(env=env)
    eventually(lambda: starts() == 2, lambda: other.log)
    go_on.touch()
    eventually(drained, lambda: other.log)
    proxy.heal(forget=forget)
    eventually(lambda: EventWorker.objects.exclude(pk=lost.pk).count() == 2, lambda: lonely.log)
    other.signal(signal.SIGTERM)
    assert other.wait() == 0, other.log
    publish(handler, {"go_on": str(go_on)})
    eventually(drained, lambda: lonely.log)
    assert EventLog.objects.filter(status="COMPLETED").count() == 4
    assert Effect.objects.count() == 4
    assert not EventWorker.objects.filter(pk=lost.pk).exists()
    invariants.check(handlers=notes)


def runs(notes):
    return sum(fact["what"] == "start" for fact in notes.read())


def test_a_worker_process_that_waits_for_a_lost_answer_is_replaced(start_worker, proxy):
    """Its supervisor keeps it registered, so no other worker would recover its events."""
    env = proxy.environment | impatient.ENVIRONMENT
    worker = start_worker("--poll-interval", "0.2", env=env)
    child = worker.wait_until_registered()
    publish("fault.effect", 0)
    handled(1, worker)
    eventually(
        lambda: proxy.blackhole(lambda link: link.has_said("enable_seqscan"), newcomers=False)
    )
    publish("fault.effect", 1)
    handled(2, worker)
    assert EventWorker.objects.get().pk != child.pk
    assert worker.process.poll() is None
    invariants.check()


def test_a_renewal_that_is_never_answered_is_repeated(start_worker, proxy):
    worker = start_worker("--poll-interval", "0.2", env=proxy.environment)
    child = worker.wait_until_registered()
    eventually(
        lambda: proxy.blackhole(lambda link: link.has_said("SET renewed_at"), newcomers=False),
        lambda: worker.log,
    )
    seen = EventWorker.objects.get(pk=child.pk).renewed_at
    eventually(lambda: EventWorker.objects.filter(renewed_at__gt=seen).exists())
    publish("fault.effect", 0)
    handled(1, worker)
    invariants.check()


def test_a_live_worker_whose_registration_was_deleted_registers_again(start_worker, tmp_path):
    publish_many(("fault.effect", n) for n in range(5))
    worker = start_worker()
    first = worker.wait_until_registered()
    eventually(drained, lambda: worker.log)
    EventWorker.objects.all().delete()
    eventually(lambda: EventWorker.objects.exclude(pk=first.pk).exists(), lambda: worker.log)
    publish("fault.effect", 5)
    eventually(drained, lambda: worker.log)
    assert Effect.objects.count() == 6
    invariants.check()


# -- F23: a slow network


@pytest.mark.parametrize("lease", [5.0, 20.0])
def test_a_slow_network_only_delays_events(start_worker, proxy, tmp_path, lease):
    """A renewal takes up to four seconds, so the worker renews in time or stops."""
    chance = seeded()
    notes = journal.HandlerJournal(tmp_path / "handlers")
    env = proxy.environment | {journal.HANDLERS: str(notes.path)}
    proxy.delay = lambda: chance.uniform(0.05, 2.0)
    options = {"ABANDON_AFTER": lease, "MAX_CRASHES": 20}
    workers = [start_worker("--batch-size", "5", eventbus=options, env=env) for _ in range(2)]
    publish_many(("fault.effect", n) for n in range(10))
    for n in range(10):
        publish("fault.effect", n, key=f"k{n % 3}")

    def works_or_is_fenced():
        fenced = lease == 5.0 and any("in time" in each.log for each in workers)
        return fenced or Effect.objects.exists()

    eventually(works_or_is_fenced, lambda: workers[0].log, patience=200)
    proxy.delay = None
    eventually(drained, lambda: workers[0].log, patience=100)
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == 20
    assert not QueuedEvent.objects.exists()
    invariants.check(handlers=notes)
