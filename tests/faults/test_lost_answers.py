"""The connection is lost after the server has executed a statement, before its answer."""

import time
import uuid

import pytest
from django.db import OperationalError, connection, transaction

from django_eventbus import handler
from django_eventbus.delivery import grouped
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from django_eventbus.worker.registration import WorkerOptions
from django_eventbus.worker.worker import run_here
from tests.bus import drain, drain_with_retries, logged
from tests.faults import invariants
from tests.faults.journal import FAIL, OK, UNKNOWN, ProducerJournal
from tests.faults.proxy import AFTER, BEFORE, LATE, commits, says, through
from tests.shop.models import Effect
from tests.threads import a_session_waits_for_a_lock, in_thread
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True)

claims = says("UPDATE", "attempts + 1", "claim_token")


def leave_an_effect(event):
    Effect.objects.create(event_id=event.id, handler=event.handler_name)


@pytest.fixture
def effects():
    handler("fault.effect", name="fault.effect")(leave_an_effect)


def effects_of(name):
    return Effect.objects.filter(handler=name).count()


def nothing_is_held():
    return not EventLane.objects.exists() and not QueuedEvent.objects.exists()


def publish_noting(journal, event_id, *, own_transaction):
    """Publish and record the outcome, which may be unknown."""
    journal.intend(event_id)
    try:
        if own_transaction:
            with transaction.atomic():
                publish("fault.effect", {}, event_id=event_id)
        else:
            publish("fault.effect", {}, event_id=event_id)
    except OperationalError:
        journal.outcome(event_id, UNKNOWN)
        return
    journal.outcome(event_id, OK)


@pytest.mark.parametrize(("own_transaction", "handled_in_between"), [(True, False), (False, True)])
@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_publish_whose_commit_was_not_answered_can_be_repeated(
    proxy, effects, tmp_path, when, handled_in_between, own_transaction
):
    """F21: the caller gets the error; publishing the same event id again adds no event."""
    journal = ProducerJournal(tmp_path / "producer")
    event_id = uuid.uuid4()
    proxy.cut(commits, when)
    with through(proxy):
        publish_noting(journal, event_id, own_transaction=own_transaction)
    assert journal.outcomes() == {str(event_id): UNKNOWN}
    assert QueuedEvent.objects.count() == (when == AFTER)
    if handled_in_between:
        drain()
    publish_noting(journal, event_id, own_transaction=own_transaction)
    drain()
    assert journal.outcomes() == {str(event_id): OK}
    assert EventLog.objects.get().event_id == event_id
    assert effects_of("fault.effect") == 1
    invariants.check([journal])


def test_a_publish_can_be_repeated_before_the_server_receives_the_first_commit(proxy, effects):
    """F21: the repetition waits for the first transaction, and then adds no event."""
    event_id = uuid.uuid4()
    cut = proxy.cut(commits, LATE)
    with through(proxy), pytest.raises(OperationalError):
        publish("fault.effect", {}, event_id=event_id)
    with in_thread(publish, "fault.effect", {}, event_id=event_id):
        eventually(a_session_waits_for_a_lock)
        proxy.let_arrive(cut)
    assert QueuedEvent.objects.get().event_id == event_id
    drain()
    invariants.check()
    assert effects_of("fault.effect") == 1


def test_a_transaction_that_never_reached_its_commit_published_nothing(proxy, effects, tmp_path):
    journal = ProducerJournal(tmp_path / "producer")
    event_id = uuid.uuid4()
    proxy.cut(says("INSERT", "queuedevent"))
    journal.intend(event_id)
    with through(proxy), pytest.raises(OperationalError), transaction.atomic():
        publish("fault.effect", {}, event_id=event_id)
    journal.outcome(event_id, FAIL)
    drain()
    invariants.check([journal])
    assert not EventLog.objects.exists()


def first_commit_after(matches):
    """A COMMIT that comes after a message that matches."""
    seen = []

    def is_it(message):
        seen.extend([message] if matches(message) else [])
        return bool(seen) and commits(message)

    return is_it


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("key", [None, "k"])
def test_a_claim_that_was_not_answered_is_released_uncharged(proxy, effects, key, when):
    """F22: the live worker releases it itself, before it counts as abandoned."""
    publish_many((("fault.effect", n) for n in range(5)), key=key)
    claim = claims if key is None else first_commit_after(claims)
    cut = proxy.cut(claim, when)
    with through(proxy):
        drain()
    assert cut.happened.is_set()
    assert effects_of("fault.effect") == 5
    assert set(EventLog.objects.values_list("attempts", "crashes")) == {(1, 0)}
    assert nothing_is_held()
    invariants.check()


def test_a_claim_that_the_server_receives_late_is_released(proxy, settings):
    """F22: the worker searched for the claim before it arrived, so it must search again."""
    # ABANDON_AFTER bounds the search for a lost claim, and the time that the worker may be blocked.
    settings.EVENTBUS = {"ABANDON_AFTER": 5.0, "POLL_INTERVAL": 0.2}
    late = proxy.cut(claims, LATE)

    @handler("fault.effect", name="fault.effect")
    def let_the_claim_arrive(event):
        if event.payload == 0:
            proxy.let_arrive(late)
        leave_an_effect(event)

    publish_many(("fault.effect", n) for n in range(2))
    workers = []
    options = WorkerOptions(using="default", queues=("default",), batch_size=1, poll_interval=0.2)
    with through(proxy), in_thread(run_here, options, workers.append):
        try:
            eventually(nothing_is_held)
        finally:
            workers[0].stop()
    assert late.arrived.is_set()
    assert effects_of("fault.effect") == 2
    assert set(EventLog.objects.values_list("attempts", "crashes")) == {(1, 0)}
    invariants.check()


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("key", [None, "k"])
def test_the_result_of_an_unanswered_settlement_is_read_from_the_database(proxy, key, when):
    """F22: committed settlements stay; the other events run again, one by one."""
    cuts = []

    @handler("fault.effect", name="fault.effect")
    def lose_the_commit_of_the_group(event):
        leave_an_effect(event)
        if not cuts:
            cuts.append(proxy.cut(commits, when))

    publish_many((("fault.effect", n) for n in range(5)), key=key)
    with through(proxy):
        drain()
    assert cuts[0].happened.is_set()
    assert effects_of("fault.effect") == 5
    assert set(EventLog.objects.values_list("status", "attempts")) == {("COMPLETED", 1)}
    assert nothing_is_held()
    invariants.check()


def test_a_worker_waits_for_a_settlement_that_the_server_receives_late(proxy):
    """F22: the transaction may still commit, so its handlers must not run before it has ended."""
    cuts, calls = [], []

    @handler("fault.effect", name="fault.effect")
    def lose_the_commit(event):
        calls.append(event.id)
        leave_an_effect(event)
        if not cuts:
            cuts.append(proxy.cut(commits, LATE))

    @handler("fault.effect", name="outside", atomic=False)
    def after_it(event):
        calls.append("outside")

    event = publish("fault.effect", 0)
    with through(proxy), in_thread(drain):
        eventually(a_session_waits_for_a_lock)
        proxy.let_arrive(cuts[0])
    assert calls == [event.event_id, "outside"]
    assert effects_of("fault.effect") == 1
    assert logged(event).status == "COMPLETED"
    invariants.check()


def test_no_event_overtakes_one_whose_retry_was_committed_unanswered(proxy):
    """F22, I3: the claim has ended, although the event is not completed."""
    calls = []

    @handler("fault.effect", name="fault.effect")
    def fail_once_and_fill_the_group(event):
        calls.append(event.payload)
        if len(calls) == 1:
            time.sleep(grouped.GROUP_SECONDS * 2)
            proxy.cut(commits)
            raise ValueError("once")
        leave_an_effect(event)

    publish_many((("fault.effect", n) for n in range(3)), key="k")
    with through(proxy):
        drain_with_retries()
    assert calls == [0, 0, 1, 2]
    assert nothing_is_held()
    invariants.check()


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_handler_settled_before_a_plain_handler_is_not_run_again(proxy, when):
    """F22: the claim continues after this commit, so owning it does not prove a rollback."""
    cuts, outside = [], []

    @handler("fault.effect", name="fault.effect")
    def inside(event):
        leave_an_effect(event)
        if not cuts:
            cuts.append(proxy.cut(commits, when))

    @handler("fault.effect", name="outside", atomic=False)
    def after_it(event):
        outside.append(event.id)

    events = [publish("fault.effect", n) for n in range(3)]
    with through(proxy):
        drain()
    assert cuts[0].happened.is_set()
    assert effects_of("fault.effect") == 3
    assert outside == [event.event_id for event in events]
    assert set(EventLog.objects.values_list("status", flat=True)) == {"COMPLETED"}
    invariants.check()


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_handler_that_ran_alone_and_was_committed_unanswered_is_done(proxy, when):
    """F22: the group fails, each handler runs in its own transaction, the first answer is lost."""
    calls, cuts = [], []

    @handler("fault.effect", name="fault.effect", priority=1)
    def first(event):
        calls.append("first")
        leave_an_effect(event)
        if len(calls) == 1:
            connection.close()
        elif not cuts:
            cuts.append(proxy.cut(commits, when))

    @handler("fault.effect", name="second")
    def second(event):
        leave_an_effect(event)

    event = publish("fault.effect", 0)
    with through(proxy):
        drain_with_retries()
    assert cuts[0].happened.is_set()
    assert effects_of("fault.effect") == effects_of("second") == 1
    assert logged(event).status == "COMPLETED"
    invariants.check()


@pytest.mark.parametrize("when", [BEFORE, AFTER])
def test_a_plain_handler_whose_settlement_was_not_answered_is_not_run_again(proxy, when):
    """F22: its work cannot be rolled back, so the settlement is repeated, not the handler."""
    runs = []

    @handler("outside", atomic=False)
    def once(event):
        runs.append(event.id)
        proxy.cut(commits, when)

    event = publish("outside", {})
    with through(proxy):
        drain()
    assert runs == [event.event_id]
    assert logged(event).status == "COMPLETED"
    invariants.check()
