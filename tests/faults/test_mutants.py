"""Each guard is taken away, and the fault test that protects it must then fail.

A fault test that passes without its guard proves nothing. The scenarios are the fault tests
themselves, called by name; a mutant is the same for every database, so it is made of the store's
verbs and not of its SQL.
"""

import pytest
from django.db import connection
from django.db.models import F

from django_eventbus.models import EventLane, QueuedEvent
from django_eventbus.store import base, postgresql
from django_eventbus.store.base import Store
from django_eventbus.transactions import GroupTransaction
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
    """Every store that has its own way of doing it."""
    return [cls for cls in (*Store.__mro__, *Store.__subclasses__()) if verb in vars(cls)]


@pytest.fixture
def mutate(monkeypatch):
    def replace(verb, mutant_of):
        for cls in classes_with(verb):
            monkeypatch.setattr(cls, verb, mutant_of(vars(cls)[verb]))

    return replace


# -- the fence: settle only under the token of the claim


@pytest.fixture
def settles_by_id(mutate):
    """As most queues do: whoever holds the row now, it is settled."""

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


def test_without_the_fence_a_late_finalize_ends_the_second_try(
    settles_by_id,
    take,  # noqa: F811
    finish,  # noqa: F811
    clock,
):
    must_fail(
        polling.test_the_late_finalize_of_an_abandoned_event_has_no_effect_on_the_second_try,
        take,
        finish,
        clock,
    )


# -- the settle count: fewer rows than expected is a lost claim


@pytest.fixture
def nobody_counts(monkeypatch):
    for module in (base, postgresql):
        monkeypatch.setattr(module, "expect", lambda count, expected: None)


def test_without_the_count_a_settle_stands_in_part(nobody_counts, store, worker_id):
    must_fail(settling.test_one_lost_claim_takes_the_whole_settle_back, store, worker_id)


def test_without_the_count_an_event_is_settled_twice(nobody_counts, store, worker_id):
    must_fail(settling.test_an_event_is_settled_once, store, worker_id)


@pytest.mark.skipif("connection.vendor == 'sqlite'", reason="SQLite has one writer")
def test_without_the_count_the_effects_of_a_lost_claim_are_committed(
    nobody_counts, transactional_db
):
    must_fail(delivering.test_a_lost_claim_commits_nothing_of_its_group, transactional_db)


# -- the savepoint: what a failed handler did is taken back, and nothing else


@pytest.fixture
def nothing_is_undone(monkeypatch):
    def keep(group):
        group._handler_runs = False
        if not group._savepoint_owed:
            connection.savepoint_commit(group._sid)
        group._savepoint_owed = False
        connection.savepoint_ids.pop()

    monkeypatch.setattr(GroupTransaction, "undo", keep)


def test_without_the_savepoint_the_writes_of_a_failed_handler_stay(nothing_is_undone):
    must_fail(delivering.test_a_failing_handler_takes_only_its_own_writes_back)


def test_without_the_savepoint_a_failed_event_leaves_its_mark_among_its_neighbours(
    nothing_is_undone,
):
    must_fail(delivering.test_a_failing_event_leaves_its_neighbours_of_the_group_alone)


def test_without_the_savepoint_the_children_of_a_failed_handler_live(nothing_is_undone):
    must_fail(delivering.test_events_published_by_a_handler_that_fails_never_were)


def test_without_the_savepoint_callbacks_of_a_failed_handler_run(
    nothing_is_undone, transactional_db
):
    must_fail(delivering.test_callbacks_of_a_handler_that_failed_do_not_run, transactional_db)


# -- attempts are counted at the claim, crashes by whoever finds the run gone


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


def test_without_counting_at_the_claim_a_lost_attempt_is_forgotten(claims_charge_nothing, clock):
    must_fail(recovering.test_events_of_a_silent_worker_are_claimed_again, clock)


@pytest.fixture
def crashes_are_not_counted(mutate):
    def mutant_of(take_back):
        def uncounted(store, whose, *, blamed, error, crashed=True):
            return take_back(store, whose, blamed=blamed, error=error, crashed=False)

        return uncounted

    mutate("_take_back_rows", mutant_of)


def test_without_counting_crashes_a_poison_event_runs_for_ever(
    crashes_are_not_counted,
    take,  # noqa: F811
    clock,
):
    must_fail(polling.test_an_event_abandoned_too_often_is_dead_as_crashed, take, clock)


@pytest.fixture
def everybody_is_blamed(mutate):
    def mutant_of(take_back):
        def blame_all(store, whose, *, blamed, error, crashed=True):
            return take_back(store, whose, blamed=None, error=error, crashed=crashed)

        return blame_all

    mutate("_take_back_rows", mutant_of)


def test_without_the_blame_list_neighbours_are_charged(everybody_is_blamed, store):
    must_fail(recovering.test_a_supervisor_blames_exactly_what_was_running, store)


def test_without_the_suspects_neighbours_are_charged(everybody_is_blamed, clock):
    must_fail(recovering.test_a_worker_that_named_its_suspects_lets_the_others_go_uncharged, clock)


# -- lanes: owning the lane is owning the key


@pytest.fixture
def nobody_owns_a_lane(mutate):
    def mutant_of(claim_keyed):
        def unowned(store, claim, limit):
            claimed = claim_keyed(store, claim, limit)
            EventLane.objects.update(claim_token=None, claimed_by=None)
            return claimed

        return unowned

    mutate("_claim_keyed", mutant_of)


@pytest.fixture
def heads_look_free(mutate, monkeypatch):
    """PostgreSQL looks in the statement that claims, the others before."""
    blind = postgresql._CLAIM_RUNS.replace("WHERE NOT waits", "WHERE true")
    assert blind != postgresql._CLAIM_RUNS
    monkeypatch.setattr(postgresql, "_CLAIM_RUNS", blind)

    def mutant_of(heads):
        def free(store, lanes, length):
            return [(lane, row, "PENDING", True) for lane, row, *_ in heads(store, lanes, length)]

        return free

    mutate("heads", mutant_of)


def test_without_an_owner_a_key_is_taken_from_who_still_works_on_it(
    nobody_owns_a_lane, store, worker_id
):
    must_fail(ordering.test_a_key_stays_with_its_claim_until_that_gives_it_back, store, worker_id)


def test_without_an_owner_and_a_look_at_the_head_a_key_runs_twice_at_once(
    nobody_owns_a_lane, heads_look_free, store, worker_id
):
    must_fail(ordering.test_a_key_is_owned_by_one_claim_at_a_time, store, worker_id)


def test_without_a_look_at_the_head_a_lane_freed_by_hand_runs_twice_at_once(
    heads_look_free, store, worker_id
):
    must_fail(
        ordering.test_a_lane_whose_head_is_still_being_handled_is_left_alone, store, worker_id
    )
