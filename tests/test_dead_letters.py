"""Dead letters: what they keep, and what can be done with them.

M26 requires that listing, retrying and purging need no worker. Workers only run here to make events
fail, or to handle retried events.
"""

import inspect
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_eventbus import (
    Discard,
    Event,
    dead_letters,
    events,
    finalize,
    handler,
    poll,
    publish,
    publish_many,
)
from django_eventbus.exceptions import InvalidPayloadError, UnknownEventError
from django_eventbus.models import DeadEvent, EventLog, EventWorker, QueuedEvent
from django_eventbus.registry import subscribe, unsubscribe
from django_eventbus.store import history, store_for
from tests.bus import drain, drain_with_retries, logged
from tests.plans import that_read

pytestmark = pytest.mark.django_db

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)


def dead_letter(
    type="order.placed",
    payload=None,
    *,
    error=None,
    handler_name="shop.ship",
    died_at=None,
    **options,
):
    """An event whose only handler gave up at the first error."""

    def fail(event):
        raise error or ValueError("no stock")

    subscription = subscribe(type, fail, name=handler_name, retry={"max_retries": 0})
    event = publish(type, {} if payload is None else payload, **options)
    drain()
    unsubscribe(subscription)
    if died_at is not None:
        EventLog.objects.filter(event_id=event.event_id).update(finished_at=died_at)
    return DeadEvent.objects.get(event_id=event.event_id)


def many_dead_letters(count):
    """Dead letters whose payload is their number, in the order of death."""

    def fail(event):
        raise ValueError("no stock")

    subscription = subscribe("bulk", fail, name="bulk", retry={"max_retries": 0})
    publish_many(("bulk", number) for number in range(count))
    drain()
    unsubscribe(subscription)


def ids_of(events):
    return [each.event_id for each in events]


def test_a_dead_letter_keeps_the_event_the_reason_and_the_time():
    """M13: the original event, the reason, the time of failure, the full traceback."""
    letter = dead_letter(
        payload={"order": 7},
        key="order:7",
        headers={"tenant": "north"},
        priority=3,
        error=KeyError("stock"),
    )
    assert (letter.type, letter.payload, letter.key) == ("order.placed", {"order": 7}, "order:7")
    assert (letter.headers, letter.priority) == ({"tenant": "north"}, 3)
    assert (letter.status, letter.dead_handler) == ("FAILED", "shop.ship")
    assert letter.error_type == "KeyError"
    (error,) = letter.errors
    assert (error["handler"], error["message"]) == ("shop.ship", "'stock'")
    assert error["traceback"].startswith("Traceback (most recent call last):")
    assert "in fail\n    raise error" in error["traceback"]
    assert error["traceback"].endswith("KeyError: 'stock'\n")
    failed_at = datetime.fromisoformat(error["at"])
    assert timedelta(0) <= store_for().read_clock() - failed_at < timedelta(minutes=1)
    assert abs(letter.finished_at - failed_at) < timedelta(minutes=1)


def test_the_errors_of_all_attempts_are_kept_in_order():
    """M28."""

    @handler("order.placed", name="shop.ship", retry={"max_retries": 2})
    def fail(event):
        raise ValueError(f"failure {event.attempt}")

    event = publish("order.placed", {})
    drain_with_retries()
    recorded = [(each["attempt"], each["message"]) for each in logged(event).errors]
    assert recorded == [(1, "failure 1"), (2, "failure 2"), (3, "failure 3")]


def test_an_event_that_only_some_handlers_completed_is_a_dead_letter():
    handler("order.placed", name="fine")(lambda event: None)
    letter = dead_letter()
    assert letter.status == "COMPLETED_WITH_ERRORS"
    states = {name: state["state"] for name, state in letter.deliveries.items()}
    assert states == {"fine": "done", "shop.ship": "dead"}


def test_a_discarded_event_is_a_dead_letter():
    letter = dead_letter(error=Discard("the order was cancelled"))
    assert letter.status == "DISCARDED"
    assert letter.errors[0]["message"] == "the order was cancelled"


def test_a_completed_event_is_not_a_dead_letter():
    handler("order.placed", name="fine")(lambda event: None)
    publish("order.placed", {})
    drain()
    assert EventLog.objects.count() == 1
    assert dead_letters.list() == []


def test_the_newest_dead_letters_are_listed_first():
    """M26: by time of death, not by time of publishing."""
    middle = dead_letter(died_at=NOON)
    newest = dead_letter(died_at=NOON + timedelta(hours=1))
    oldest = dead_letter(died_at=NOON - timedelta(hours=1))
    assert ids_of(dead_letters.list()) == ids_of([newest, middle, oldest])


def test_a_list_has_at_most_one_hundred_by_default():
    """M26."""
    many_dead_letters(103)
    EventLog.objects.update(finished_at=NOON)
    assert [each.payload for each in dead_letters.list()] == list(range(102, 2, -1))
    assert [each.payload for each in dead_letters.list(limit=2)] == [102, 101]
    assert [each.payload for each in dead_letters.list(limit=2, offset=101)] == [1, 0]
    assert dead_letters.list(offset=103) == []


def test_a_list_is_one_query():
    dead_letter()
    with CaptureQueriesContext(connection) as queries:
        assert len(dead_letters.list(type="order.*", handler="shop.ship")) == 1
    assert len(that_read(queries)) == 1


@pytest.fixture
def two_letters(settings):
    """The filters below select the first, and the second shares no value with it."""
    settings.EVENTBUS = {"QUEUES": ["default", "mail"]}
    chosen = dead_letter(key="order:7", queue="mail", error=KeyError(7), died_at=NOON)
    other = dead_letter(
        "stock.empty", key="stock:1", handler_name="stock.buy", died_at=NOON + timedelta(hours=1)
    )
    return chosen, other


FILTERS = [
    {"type": "order.placed"},
    {"type": "order.*"},
    {"type": "o*"},
    {"handler": "shop.ship"},
    {"queue": "mail"},
    {"key": "order:7"},
    {"error_type": "KeyError"},
    {"older_than": NOON},
    {"type": "order.*", "key": "order:7", "queue": "mail", "handler": "shop.ship"},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_filter_applies_to_the_list(two_letters, filters):
    assert ids_of(dead_letters.list(**filters)) == [two_letters[0].event_id]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_filter_applies_to_retry(two_letters, filters):
    chosen, other = two_letters
    assert dead_letters.retry(**filters) == 1
    assert ids_of(QueuedEvent.objects.all()) == [chosen.event_id]
    assert ids_of(dead_letters.list()) == [other.event_id]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_every_filter_applies_to_purge(two_letters, filters):
    assert dead_letters.purge(**filters) == 1
    assert ids_of(dead_letters.list()) == [two_letters[1].event_id]


def test_the_event_id_is_a_filter_too(two_letters):
    chosen, _ = two_letters
    assert ids_of(dead_letters.list(event_id=chosen.event_id)) == [chosen.event_id]
    assert dead_letters.purge(event_id=chosen.event_id) == 1


def test_filters_must_all_match(two_letters):
    assert dead_letters.list(type="order.placed", handler="stock.buy") == []
    assert dead_letters.retry(type="order.placed", handler="stock.buy") == 0
    assert dead_letters.purge(type="order.placed", handler="stock.buy") == 0


def test_a_star_at_the_end_of_a_type_is_the_only_wildcard():
    dead_letter("a_b%.x")
    dead_letter("aXbY.x")
    assert [each.type for each in dead_letters.list(type="a_b%.*")] == ["a_b%.x"]


def test_a_retried_event_has_no_attempts_and_no_errors():
    """M26: pending, no attempts, no errors. M15: the key and all other data are kept."""
    letter = dead_letter(payload={"order": 7}, key="order:7", priority=3, headers={"h": 1})
    assert letter.attempts == 1
    assert dead_letters.retry(letter) == 1
    row = QueuedEvent.objects.get()
    assert (row.status, row.attempts, row.crashes) == ("PENDING", 0, 0)
    assert (row.errors, row.deliveries) == (None, None)
    assert (row.available_at, row.claim_token, row.claimed_by) == (None, None, None)
    assert row.processing_started_at is None
    for name in ("event_id", "type", "payload", "key", "priority", "headers", "queue"):
        assert getattr(row, name) == getattr(letter, name)
    assert row.created_at == letter.created_at
    assert not EventLog.objects.exists()


def test_a_retried_event_is_handled():
    """M15: the handler finds the key the event was published with."""
    letter = dead_letter(payload={"order": 7}, key="order:7")
    seen = []
    handler("order.placed", name="shop.ship")(seen.append)
    dead_letters.retry(letter)
    drain()
    (event,) = seen
    assert (event.id, event.payload, event.key) == (letter.event_id, {"order": 7}, "order:7")
    assert (event.attempt, event.delivery_count) == (1, 1)
    assert logged(letter).status == "COMPLETED"
    assert dead_letters.list() == []


def test_handlers_that_were_done_stay_done():
    """M26: only handlers that did not complete run again."""
    runs = []
    handler("order.placed", name="fine")(lambda event: runs.append("fine"))
    letter = dead_letter()
    handler("order.placed", name="shop.ship")(lambda event: runs.append("shop.ship"))
    dead_letters.retry(letter)
    drain()
    assert runs == ["fine", "shop.ship"]
    assert logged(letter).status == "COMPLETED"


def test_an_event_that_dies_again_has_the_errors_of_its_second_life_and_a_history():
    letter = dead_letter(error=ValueError("first life"))
    dead_letters.retry(letter, by="anna")
    handler("order.placed", name="shop.ship", retry={"max_retries": 1})(_fail_differently)
    drain_with_retries()
    again = DeadEvent.objects.get(event_id=letter.event_id)
    assert [each["message"] for each in again.errors] == ["second life"] * 2
    assert [each["attempt"] for each in again.errors] == [1, 2]
    assert (again.life, letter.life) == (2, 1)
    (life,) = again.history
    assert (life["life"], life["retried_by"]) == (1, "anna")
    assert (life["status"], life["attempts"], life["crashes"]) == ("FAILED", 1, 0)
    assert life["errors"] == letter.errors
    assert datetime.fromisoformat(life["finished_at"]) == letter.finished_at
    assert letter.finished_at <= datetime.fromisoformat(life["retried_at"]) <= again.finished_at


def test_an_event_that_succeeds_after_a_retry_keeps_its_earlier_life():
    letter = dead_letter()
    dead_letters.retry(letter, by="anna")
    handler("order.placed", name="shop.ship")(lambda event: None)
    drain()
    assert (logged(letter).status, logged(letter).errors) == ("COMPLETED", None)
    assert [life["errors"] for life in logged(letter).history] == [letter.errors]


def test_every_kind_of_retry_keeps_the_life_before_it():
    handler("order.placed", name="a", retry={"max_retries": 0})(_fail_differently)
    letter = dead_letter(handler_name="b")
    subscribe("order.placed", _fail_differently, name="b", retry={"max_retries": 0})
    dead_letters.retry(letter, by="anna")
    drain()
    dead_letters.retry(letter.event_id, only="b", by="bob")
    drain()
    dead_letters.edit(letter.event_id, {"new": 1}, by="carl")
    drain()
    first, second, third = logged(letter).history
    assert [life["life"] for life in (first, second, third)] == [1, 2, 3]
    assert [life["retried_by"] for life in (first, second, third)] == ["anna", "bob", "carl"]
    assert [life["retried_handler"] for life in (first, second, third)] == ["", "b", ""]
    assert [life["edited"] for life in (first, second, third)] == [False, False, True]
    handlers = [[error["handler"] for error in life["errors"]] for life in (first, second, third)]
    assert handlers == [["a", "b"], ["b"], ["a", "b"]], "each error once"
    assert logged(letter).life == 4


def test_the_first_and_the_last_of_very_many_lives_are_kept():
    handler("order.placed", name="shop.ship", retry={"max_retries": 0})(_fail_differently)
    letter = publish("order.placed", {})
    drain()
    for _ in range(14):
        dead_letters.retry(letter.event_id, by="anna")
        drain()
    history = logged(letter).history
    assert [life.get("life") for life in history] == [1, 2, None, *range(7, 15)]
    assert history[2] == {"omitted": 4}
    assert logged(letter).life == 15


def test_a_long_history_is_kept_without_tracebacks(monkeypatch):
    monkeypatch.setattr(history, "MAX_HISTORY_BYTES", 2000)
    handler("order.placed", name="shop.ship", retry={"max_retries": 3, "base_delay": 0})(
        _fail_differently
    )
    letter = publish("order.placed", {})
    drain_with_retries()
    dead_letters.retry(letter.event_id)
    (life,) = QueuedEvent.objects.get().history
    assert [each["message"] for each in life["errors"]] == ["second life"] * 4
    assert {each["traceback"] for each in life["errors"]} == {""}


def test_a_retry_does_not_move_when_a_group_was_first_seen():
    handler("order.placed", name="shop.ship", retry={"max_retries": 0})(_fail_differently)
    letter = publish("order.placed", {})
    drain()
    (before,) = dead_letters.groups()
    for _ in range(3):
        dead_letters.retry(letter.event_id)
        drain()
    (after,) = dead_letters.groups()
    (among,) = dead_letters.groups(among=DeadEvent.objects.all())
    assert after.fingerprint == before.fingerprint
    assert (after.first_at, among.first_at) == (before.first_at, before.first_at)
    assert after.last_at == among.last_at > before.last_at


def test_an_event_that_dies_of_another_error_joins_a_new_group():
    letter = dead_letter(error=ValueError("first life"))
    dead_letters.retry(letter)
    handler("order.placed", name="shop.ship", retry={"max_retries": 0})(_fail_differently)
    drain()
    for groups in (dead_letters.groups(), dead_letters.groups(among=DeadEvent.objects.all())):
        (group,) = groups
        assert group.fingerprint != letter.error_fingerprint
        assert group.first_at == group.last_at == logged(letter).finished_at


def _fail_differently(event):
    raise ValueError("second life")


def test_dead_letters_are_retried_by_id_or_by_row_or_several_at_once():
    first, second, third, fourth = (dead_letter() for _ in range(4))
    assert dead_letters.retry(first.event_id) == 1
    assert dead_letters.retry(logged(second)) == 1
    assert dead_letters.retry([third.event_id, fourth]) == 2
    assert QueuedEvent.objects.count() == 4


def test_events_that_are_not_dead_letters_are_skipped():
    handler("fine", name="fine")(lambda event: None)
    completed, letter = publish("fine", {}), dead_letter()
    waiting = publish("order.placed", {})
    given = [completed.event_id, waiting.event_id, uuid.uuid4(), letter.event_id]
    assert dead_letters.retry(given) == 1
    assert dead_letters.retry(given) == 0
    assert dead_letters.retry([]) == 0
    assert logged(completed).status == "COMPLETED"
    assert set(ids_of(QueuedEvent.objects.all())) == {waiting.event_id, letter.event_id}


def test_a_retry_is_part_of_the_callers_transaction():
    letter = dead_letter()
    with transaction.atomic():
        dead_letters.retry(letter)
        transaction.set_rollback(True)
    assert not QueuedEvent.objects.exists()
    assert ids_of(dead_letters.list()) == [letter.event_id]


def test_purge_deletes_events_that_died_at_that_time_or_before():
    """M26: the bound is inclusive."""
    moment = timedelta(milliseconds=1)
    dead_letter(died_at=NOON - moment)
    dead_letter(died_at=NOON)
    younger = dead_letter(died_at=NOON + moment)
    assert dead_letters.purge(older_than=NOON) == 2
    assert ids_of(dead_letters.list()) == [younger.event_id]


def test_purge_counts_a_time_span_back_from_now():
    now = store_for().read_clock()
    dead_letter(died_at=now - timedelta(days=30, minutes=1))
    younger = dead_letter(died_at=now - timedelta(days=29, hours=23))
    assert dead_letters.purge(older_than=timedelta(days=30)) == 1
    assert ids_of(dead_letters.list()) == [younger.event_id]


def test_purge_uses_the_time_of_death_not_of_publishing():
    """M26."""
    letter = dead_letter(died_at=NOON)
    EventLog.objects.update(created_at=NOON - timedelta(days=300))
    assert dead_letters.purge(older_than=NOON - timedelta(days=1)) == 0
    assert ids_of(dead_letters.list()) == [letter.event_id]


def test_purge_keeps_completed_events():
    handler("fine", name="fine")(lambda event: None)
    completed = publish("fine", {})
    dead_letter()
    EventLog.objects.update(finished_at=NOON)
    assert dead_letters.purge(older_than=NOON) == 1
    assert logged(completed).status == "COMPLETED"


def test_a_long_retry_reports_its_progress_in_chunks(monkeypatch):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    progress = []
    assert dead_letters.retry(type="*", progress=progress.append) == 5
    assert progress == [2, 4, 5]
    assert QueuedEvent.objects.count() == 5


def test_a_long_purge_reports_its_progress_in_chunks(monkeypatch):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    progress = []
    assert dead_letters.purge(type="*", progress=progress.append) == 5
    assert progress == [2, 4, 5]
    assert not EventLog.objects.exists()


def test_dead_letters_need_no_worker():
    """M26."""
    many_dead_letters(3)
    assert not EventWorker.objects.exists()
    newest, *_ = dead_letters.list()
    assert dead_letters.retry(newest) == 1
    assert dead_letters.purge(type="bulk") == 2
    assert not EventWorker.objects.exists()


def test_the_dead_letters_of_other_namespaces_cannot_be_changed(settings):
    """M8: namespaces share a database, not their dead letters."""
    ours = dead_letter()
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    assert dead_letters.list() == []
    assert dead_letters.retry(ours.event_id) == 0
    assert dead_letters.purge(type="*") == 0
    settings.EVENTBUS = {}
    assert ids_of(dead_letters.list()) == [ours.event_id]


def test_a_prefix_is_case_sensitive():
    dead_letter("Order.x")
    dead_letter("order.x")
    assert [each.type for each in dead_letters.list(type="Order.*")] == ["Order.x"]


@pytest.mark.parametrize("act", [dead_letters.retry, dead_letters.purge])
def test_a_bulk_action_without_events_or_filters_is_refused(act):
    dead_letter("order.x")
    with pytest.raises(ValueError, match="pass events or filters"):
        act()
    assert len(dead_letters.list()) == 1
    assert act(type="*") == 1


def test_dead_letters_can_be_retried_at_a_pace(clock_of_rows):
    many_dead_letters(3)
    assert dead_letters.retry(type="*", per_minute=30, delay=10) == 3
    assert clock_of_rows() == [10, 12, 14]


def test_a_pace_continues_across_chunks(monkeypatch, clock_of_rows):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    dead_letters.retry(type="*", per_minute=60, delay=1)
    assert clock_of_rows() == [1, 2, 3, 4, 5]


def test_a_pace_of_zero_is_refused():
    with pytest.raises(ValueError, match="more than 0"):
        dead_letters.retry(type="*", per_minute=0)


@pytest.fixture
def clock_of_rows():
    """The rounded seconds until each queued event is due, in order."""

    def seconds():
        now = store_for().read_clock()
        times = QueuedEvent.objects.order_by("id").values_list("available_at", flat=True)
        return [round((moment - now).total_seconds()) for moment in times]

    return seconds


def test_one_handler_can_be_retried_while_another_stays_dead():
    runs = []
    handler("order.placed", name="a", retry={"max_retries": 0})(_fail_differently)
    handler("order.placed", name="fine")(lambda event: runs.append("fine"))
    letter = dead_letter(handler_name="b")
    assert dead_letters.retry(letter, only="b") == 1
    subscribe("order.placed", lambda event: runs.append("b"), name="b")
    drain()
    again = DeadEvent.objects.get(event_id=letter.event_id)
    assert runs == ["fine", "b"]
    assert {name: state["state"] for name, state in again.deliveries.items()} == {
        "a": "dead",
        "fine": "done",
        "b": "done",
    }
    assert (again.dead_handler, [each["handler"] for each in again.errors]) == ("a", ["a"])


def test_a_completed_handler_cannot_be_retried_by_its_name():
    runs = []
    handler("order.placed", name="fine")(lambda event: runs.append("fine"))
    letter = dead_letter()
    dead_letters.retry(letter, only="fine")
    drain()
    assert runs == ["fine"]
    assert logged(letter).dead_handler == "shop.ship"


def test_an_edited_dead_letter_is_retried_with_its_new_payload_and_keeps_the_old_one():
    letter = dead_letter(payload={"order": 7})
    assert dead_letters.edit(letter, {"order": 8}, by="anna")
    seen = []
    handler("order.placed", name="shop.ship")(lambda event: seen.append(event.payload))
    drain()
    assert seen == [{"order": 8}]
    (edit,) = logged(letter).edits
    assert (edit["by"], edit["payload"]) == ("anna", {"order": 7})
    assert datetime.fromisoformat(edit["at"]).tzinfo is not None


def test_every_payload_that_was_replaced_is_kept():
    letter = dead_letter(payload=1)
    dead_letters.edit(letter, 2)
    handler("order.placed", name="shop.ship", retry={"max_retries": 0})(_fail_differently)
    drain()
    dead_letters.edit(letter.event_id, 3)
    assert [each["payload"] for each in QueuedEvent.objects.get().edits] == [1, 2]


@pytest.mark.parametrize(
    "payload", [float("nan"), {"text": "\x00"}, {1: 2}, object(), "x" * 300_000]
)
def test_an_edit_to_an_invalid_payload_is_refused(payload):
    letter = dead_letter(payload=1)
    with pytest.raises(InvalidPayloadError):
        dead_letters.edit(letter, payload)
    assert logged(letter).payload == 1


def test_an_edit_must_match_the_class_of_the_event(monkeypatch):
    monkeypatch.setattr(events, "_classes", {})

    class Edited(Event, type="order.edited"):
        order: int

    letter = dead_letter("order.edited", {"order": 7})
    with pytest.raises(UnknownEventError, match="has no field other"):
        dead_letters.edit(letter, {"other": 7})
    assert dead_letters.edit(letter, {"order": 8})


def test_only_a_dead_letter_can_be_edited():
    letter = dead_letter(payload=1)
    dead_letters.retry(letter)
    assert not dead_letters.edit(letter, 2)
    assert QueuedEvent.objects.get().payload == 1


def test_dead_letters_with_the_same_error_are_one_group():
    for moment in (1, 2, 3):
        dead_letter(died_at=NOON + timedelta(hours=moment))
    other = dead_letter(handler_name="stock.buy", error=KeyError(1), died_at=NOON)
    handler("fine", name="fine")(lambda event: None)
    publish("fine", {})
    drain()
    ships, buys = dead_letters.groups()
    assert (ships.count, ships.latest.dead_handler, ships.latest.error_type) == (
        3,
        "shop.ship",
        "ValueError",
    )
    assert ships.first_at == NOON + timedelta(hours=1)
    assert ships.last_at == ships.latest.finished_at == NOON + timedelta(hours=3)
    assert (buys.count, buys.latest) == (1, other)
    assert len(dead_letters.list(fingerprint=ships.fingerprint)) == 3


def test_groups_are_counted_up_to_a_bound_by_three_queries():
    many_dead_letters(5)
    dead_letter()
    with CaptureQueriesContext(connection) as queries:
        counts = [each.count for each in dead_letters.groups(count_at_most=3)]
    assert len(that_read(queries)) == 3
    assert sorted(counts) == [1, 3]
    assert len(dead_letters.groups(limit=1, offset=1)) == 1
    assert dead_letters.groups(offset=2) == []


def test_without_dead_letters_there_are_no_groups():
    assert dead_letters.groups() == []


def test_groups_of_other_namespaces_are_not_shown(settings):
    dead_letter()
    settings.EVENTBUS = {"NAMESPACE": "theirs"}
    assert dead_letters.groups() == []


def test_a_dead_letter_without_an_error_is_in_a_group(settings):
    settings.EVENTBUS = {"ABANDON_AFTER": 60}
    publish("order.placed", {})
    finalize(poll(), failed=True)
    (group,) = dead_letters.groups()
    assert group.count == 1


def test_a_star_in_the_middle_of_a_type_is_refused():
    with pytest.raises(ValueError, match="only at its end"):
        dead_letters.list(type="order.*.x")


def test_type_checkers_know_every_filter():
    taken = inspect.signature(dead_letters.matching).parameters.keys() - {"using"}
    assert dead_letters.FiltersByAge.__annotations__.keys() == taken
    assert dead_letters.Filters.__annotations__.keys() == taken - {"older_than"}


def test_a_bulk_retry_reads_each_dead_letter_once(monkeypatch):
    """A page starts where the previous one ended, even if some events did not match."""
    monkeypatch.setattr(dead_letters, "CHUNK", 3)
    for number in range(20):
        dead_letter(f"{'bad' if number % 2 else 'good'}.{number}", died_at=NOON)
    assert dead_letters.retry(type="bad.*") == 10
    assert set(QueuedEvent.objects.values_list("type", flat=True)) == {
        f"bad.{number}" for number in range(1, 20, 2)
    }
    assert DeadEvent.objects.count() == 10


def test_an_event_that_dies_again_during_a_bulk_retry_is_not_retried_twice(monkeypatch):
    monkeypatch.setattr(dead_letters, "CHUNK", 2)
    many_dead_letters(5)
    subscribe("bulk", lambda event: 1 / 0, name="bulk", retry={"max_retries": 0})
    assert dead_letters.retry(type="bulk", progress=lambda done: drain()) == 5
    assert DeadEvent.objects.count() == 5


@pytest.mark.skipif("connection.vendor != 'sqlite'", reason="SQLite compares times as text")
def test_a_retry_finds_events_that_died_at_a_full_second():
    """The database stores six decimals, which a parameter of a full second does not have."""
    many_dead_letters(3)
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {EventLog._meta.db_table} SET finished_at = '2026-03-01 12:00:00.000000'"
        )
    assert dead_letters.retry(type="bulk") == 3
