"""The connection is lost when the server has done what it was told, and nobody hears of it."""

import time
import uuid

import pytest
from django.db import OperationalError, connection, transaction

from django_eventbus import delivery, handler
from django_eventbus.models import EventLane, EventLog, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from django_eventbus.worker import WorkerOptions, run_here
from tests.bus import drain, drain_with_retries, logged
from tests.faults import invariants
from tests.faults.journal import FAIL, OK, UNKNOWN, ProducerJournal
from tests.faults.proxy import AFTER, BEFORE, LATE, commits, says, through
from tests.shop.models import Effect
from tests.threads import in_thread, somebody_waits_for_a_lock
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
    """As a careful producer would: the outcome is known, or known to be unknown."""
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
    """F21: the caller sees the error; with the same event id once more adds none."""
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


def test_a_publish_is_repeated_before_the_server_has_got_the_first_commit(proxy, effects):
    """F21: the repeat waits for the transaction that may yet commit, and then adds none."""
    event_id = uuid.uuid4()
    cut = proxy.cut(commits, LATE)
    with through(proxy), pytest.raises(OperationalError):
        publish("fault.effect", {}, event_id=event_id)
    with in_thread(publish, "fault.effect", {}, event_id=event_id):
        eventually(somebody_waits_for_a_lock)
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
def test_a_claim_that_was_not_answered_is_taken_back_uncharged(proxy, effects, key, when):
    """F22: by the worker itself, which lives; nobody has to wait for it to be abandoned."""
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


def test_a_claim_that_the_server_gets_late_is_taken_back_too(proxy, settings):
    """F22: when the worker looked for it there was nothing yet, and then nobody knew of it."""
    # So long it waits for the claim to arrive, and so long it may itself be kept waiting.
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
def test_a_settlement_that_was_not_answered_is_looked_up(proxy, key, when):
    """F22: settled is settled; what was not is run again, one by one."""
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


def test_a_settlement_that_the_server_gets_late_is_waited_for(proxy):
    """F22: the transaction may yet commit, so nobody may run its handlers until it has ended."""
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
        eventually(somebody_waits_for_a_lock)
        proxy.let_arrive(cuts[0])
    assert calls == [event.event_id, "outside"]
    assert effects_of("fault.effect") == 1
    assert logged(event).status == "COMPLETED"
    invariants.check()


def test_nothing_overtakes_an_event_whose_retry_was_written_down_unheard(proxy):
    """F22, I3: it is not ours any more, and it is not done."""
    calls = []

    @handler("fault.effect", name="fault.effect")
    def fail_once_and_fill_the_group(event):
        calls.append(event.payload)
        if len(calls) == 1:
            time.sleep(delivery.GROUP_SECONDS * 2)
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
def test_what_was_settled_before_an_outside_handler_is_not_run_again(proxy, when):
    """F22: the claim goes on after this commit, so that holding it says nothing about it."""
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
def test_a_handler_that_ran_alone_and_was_committed_unheard_is_done(proxy, when):
    """F22: the group breaks, each handler gets a transaction, and the first one's is cut off."""
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
def test_an_outside_handler_whose_end_was_not_heard_is_not_run_again(proxy, when):
    """F22: its work cannot be taken back, so its settlement is repeated, not its run."""
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
