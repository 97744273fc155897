"""Remove each guard, and check that the fault test for it then fails.

A fault test that passes without its guard proves nothing. The scenarios are the fault tests
themselves, called by name; a mutant is the same for every database, so it replaces operations of
the store and not its SQL.
"""

import pytest
from django.db import connection
from django.db.models import F

from django_eventbus.delivery.group import GroupTransaction
from django_eventbus.models import EventLane, QueuedEvent
from django_eventbus.store import Charge, postgresql_settling, postgresql_sql
from django_eventbus.store import settling as store_settling
from django_eventbus.store.base import Store
from tests import test_delivery as delivering
from tests import test_polling as polling
from tests.store import test_ordering as ordering
from tests.store import test_recover as recovering
from tests.store import test_settle as settling
from tests.test_polling import finish, take  # noqa: F401 - fixtures

pytestmark = pytest.mark.django_db


def must_fail(fault_test, *args):
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        fault_test(*args)


def classes_with(verb):
    """Every store class that defines the operation itself."""
    return [cls for cls in (*Store.__mro__, *subclasses_of(Store)) if verb in vars(cls)]


def subclasses_of(cls):
    for each in cls.__subclasses__():
        yield each
        yield from subclasses_of(each)


@pytest.fixture
def mutate(monkeypatch):
    def replace(verb, mutant_of):
        for cls in classes_with(verb):
            monkeypatch.setattr(cls, verb, mutant_of(vars(cls)[verb]))

    return replace


# -- the fence: settle only under the token of the claim


@pytest.fixture
def settles_by_id(mutate):
    """Settle by row id only, without the claim token."""

    def mutant_of(settle):
        def by_id(store, token, settlements):
            for each in settlements:
                row = QueuedEvent.objects.get(pk=each.row_id)
                settle(store, row.claim_token, [each])

        return by_id

    mutate("settle", mutant_of)


@pytest.mark.parametrize("kind", ["completed", "finished", "postponed", "progressed"])
def test_without_the_fence_a_lost_claim_is_settled(settles_by_id, store, worker_id, kind):
    must_fail(settling.test_a_lost_claim_is_not_settled, store, worker_id, kind)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer")
def test_without_the_fence_the_effects_of_a_lost_claim_are_committed(
    settles_by_id, transactional_db
):
    must_fail(delivering.test_a_lost_claim_commits_nothing_of_its_group, transactional_db)


def test_without_the_fence_a_late_finalize_ends_the_second_attempt(
    settles_by_id,
    take,  # noqa: F811
    finish,  # noqa: F811
    clock,
):
    must_fail(
        polling.test_the_late_finalize_of_an_abandoned_event_does_not_affect_the_second_attempt,
        take,
        finish,
        clock,
    )


# -- the settle count: fewer rows than expected is a lost claim


@pytest.fixture
def settled_rows_are_not_counted(monkeypatch):
    for module in (store_settling, postgresql_settling):
        monkeypatch.setattr(module, "require_all", lambda count, expected: None)


def test_without_the_count_a_settlement_is_partly_committed(
    settled_rows_are_not_counted, store, worker_id
):
    must_fail(settling.test_one_lost_claim_rolls_back_the_whole_settlement, store, worker_id)


def test_without_the_count_an_event_is_settled_twice(
    settled_rows_are_not_counted, store, worker_id
):
    must_fail(settling.test_an_event_is_settled_once, store, worker_id)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer")
def test_without_the_count_the_effects_of_a_lost_claim_are_committed(
    settled_rows_are_not_counted, transactional_db
):
    must_fail(delivering.test_a_lost_claim_commits_nothing_of_its_group, transactional_db)


# -- the savepoint: only the writes of a failed handler are rolled back


@pytest.fixture
def nothing_is_undone(monkeypatch):
    def keep(group, error):
        group._handler_runs = False
        if not group._savepoint_pending:
            connection.savepoint_commit(group._sid)
        group._savepoint_pending = False
        connection.savepoint_ids.pop()
        return error

    monkeypatch.setattr(GroupTransaction, "undo", keep)


def test_without_the_savepoint_the_writes_of_a_failed_handler_stay(nothing_is_undone):
    must_fail(delivering.test_a_failing_handler_rolls_back_only_its_own_writes)


def test_without_the_savepoint_a_failed_event_affects_the_others_of_its_group(
    nothing_is_undone,
):
    must_fail(delivering.test_a_failing_event_does_not_affect_the_others_of_its_group)


def test_without_the_savepoint_events_published_by_a_failed_handler_are_kept(nothing_is_undone):
    must_fail(delivering.test_events_published_by_a_failing_handler_are_rolled_back)


def test_without_the_savepoint_callbacks_of_a_failed_handler_run(
    nothing_is_undone, transactional_db
):
    must_fail(delivering.test_callbacks_of_a_handler_that_failed_do_not_run, transactional_db)


# -- attempts are counted at the claim, crashes by the recovery


@pytest.fixture
def claims_charge_nothing(mutate):
    def mutant_of(claim):
        def uncharged(store, *args):
            claimed = claim(store, *args)
            rows = [event.row_id for event in claimed]
            QueuedEvent.objects.filter(id__in=rows).update(attempts=F("attempts") - 1)
            for event in claimed:
                event.attempts -= 1
            return claimed

        return uncharged

    mutate("_claim_both", mutant_of)


def test_without_counting_at_the_claim_a_lost_attempt_is_not_counted(claims_charge_nothing, clock):
    must_fail(recovering.test_events_of_a_silent_worker_are_claimed_again, clock)


@pytest.fixture
def crashes_are_not_counted(mutate):
    def mutant_of(release_claims):
        def uncounted(store, condition, **options):
            return release_claims(store, condition, **{**options, "charge": Charge.NOTHING})

        return uncounted

    mutate("_release_claims", mutant_of)


def test_without_counting_crashes_a_poison_event_runs_for_ever(
    crashes_are_not_counted,
    take,  # noqa: F811
    clock,
):
    must_fail(polling.test_an_event_abandoned_too_often_is_dead_as_crashed, take, clock)


@pytest.fixture
def every_claimed_event_is_charged(mutate):
    """An event is charged although its handler was not running."""

    def mutant_of(release_claims):
        def charge_all(store, condition, **options):
            held = set(QueuedEvent.objects.filter(condition).values_list("id", flat=True))
            return release_claims(store, condition, **{**options, "blamed": held})

        return charge_all

    mutate("_release_claims", mutant_of)


@pytest.mark.parametrize(
    "fault_test",
    [
        recovering.test_a_supervisor_charges_exactly_the_running_events,
        recovering.test_the_end_of_a_worker_that_ran_nothing_charges_no_event,
        recovering.test_an_interrupted_claim_is_released_and_charges_no_event,
    ],
)
def test_without_the_list_of_running_events_other_events_are_charged(
    every_claimed_event_is_charged, store, fault_test
):
    must_fail(fault_test, store)


@pytest.mark.parametrize(
    "fault_test",
    [
        recovering.test_only_the_named_suspects_of_a_worker_are_charged,
        recovering.test_events_that_were_claimed_when_three_workers_died_count_one_interruption,
    ],
)
def test_without_the_list_of_running_events_a_silent_worker_charges_other_events(
    every_claimed_event_is_charged, clock, fault_test
):
    must_fail(fault_test, clock)


# -- lanes: the owner of a lane owns its key


@pytest.fixture
def lanes_have_no_owner(mutate):
    def mutant_of(claim_keyed):
        def unowned(store, claim, limit):
            claimed = claim_keyed(store, claim, limit)
            EventLane.objects.update(claim_token=None, claimed_by=None)
            return claimed

        return unowned

    mutate("_claim_keyed", mutant_of)


@pytest.fixture
def first_events_look_free(mutate, monkeypatch):
    """PostgreSQL checks in the statement that claims, the other stores before it."""
    blind = postgresql_sql.CLAIM_RUNS.replace("WHERE NOT waits", "WHERE true")
    assert blind != postgresql_sql.CLAIM_RUNS
    monkeypatch.setattr(postgresql_sql, "CLAIM_RUNS", blind)

    def mutant_of(heads):
        def free(store, lanes, length):
            return [(lane, row, "PENDING", True) for lane, row, *_ in heads(store, lanes, length)]

        return free

    mutate("heads", mutant_of)


def test_without_an_owner_a_key_is_claimed_while_a_worker_handles_it(
    lanes_have_no_owner, store, worker_id
):
    must_fail(ordering.test_a_claim_owns_a_key_until_it_releases_it, store, worker_id)


def test_without_an_owner_and_a_check_of_the_first_event_a_key_runs_concurrently(
    lanes_have_no_owner, first_events_look_free, store, worker_id
):
    must_fail(ordering.test_a_key_is_owned_by_one_claim_at_a_time, store, worker_id)


def test_without_a_check_of_the_first_event_a_released_lane_runs_concurrently(
    first_events_look_free, store, worker_id
):
    must_fail(
        ordering.test_a_lane_whose_first_event_is_being_handled_is_not_claimed, store, worker_id
    )
