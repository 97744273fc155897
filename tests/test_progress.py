"""One event on its way through its handlers: the verdict for every way that can go."""

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from django_eventbus import Discard, Retry, RetryPolicy, handler
from django_eventbus.events import Claim, ClaimedEvent
from django_eventbus.failures import fingerprint
from django_eventbus.models import LogStatus
from django_eventbus.progress import NO_HANDLER, Progress, crashed
from django_eventbus.registry import registry
from django_eventbus.store import Completed, Finished, Held, Postponed, Progressed

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NEVER = RetryPolicy(max_retries=0)
PATIENT = RetryPolicy(max_retries=5, base_delay=10, jitter=0)
LATER = RetryPolicy(max_retries=5, base_delay=25, jitter=0)
BOOM = ValueError("boom")


def claimed(states=None, errors=None, **changes):
    facts = {
        "claim": Claim(
            uuid.uuid4(), uuid.uuid4(), namespace="default", queue="default", using="default"
        ),
        "row_id": 7,
        "event_id": uuid.uuid4(),
        "type": "x",
        "version": 1,
        "payload_json": "{}",
        "headers_json": None,
        "key": None,
        "lane_id": None,
        "priority": 0,
        "attempts": 1,
        "crashes": 0,
        "producer": "test",
        "caused_by": None,
        "created_epoch": NOW.timestamp(),
        "due_epoch": None,
        "started_epoch": NOW.timestamp(),
        "deliveries_json": json.dumps(states) if states else None,
        "errors_json": json.dumps(errors) if errors else None,
    }
    return ClaimedEvent(**facts | changes)


def waits(*, seconds, failures=1):
    """The state of a handler to be tried again that many seconds from now."""
    due = NOW + timedelta(seconds=seconds)
    return {"state": "retry", "failures": failures, "due": due.isoformat()}


def error_of(name, attempt=1):
    return {
        "handler": name,
        "attempt": attempt,
        "at": NOW.isoformat(),
        "type": "ValueError",
        "message": f"{name} {attempt}",
        "traceback": "",
    }


DONE = {"state": "done", "failures": 0}
DEAD = {"state": "dead", "failures": 4}
DISCARDED = {"state": "discarded", "failures": 1}


@pytest.fixture
def handlers():
    """Register handlers of the type ``x`` by name; those that begin with ``out`` want no
    transaction."""

    def register(*names):
        for name in names:
            handler("x", name=name, atomic=not name.startswith("out"))(lambda event: None)

    return register


def names(owed):
    return [each.name for each in owed]


def states_of(settlement):
    return {name: state["state"] for name, state in settlement.deliveries.items()}


def again(settlement, seconds=1000):
    """The event as it is claimed the next time, after the wait."""
    later = claimed(settlement.deliveries, settlement.errors, attempts=2)
    later.started_epoch += seconds
    return Progress(later)


# -- the first delivery


def test_all_handlers_done_is_completed_and_there_is_nothing_to_tell(handlers):
    """M5."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    progress.succeed("b", 0.1)
    assert progress.settlement() == Completed(7)


def test_all_handlers_are_owed_a_new_event(handlers):
    handlers("a", "out", "b")
    progress = Progress(claimed())
    assert names(progress.atomic) == ["a", "b"]
    assert names(progress.outside) == ["out"]
    assert progress.unanswered() == []


def test_a_failed_handler_is_postponed_and_the_done_one_is_remembered(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.row_id == 7
    assert settlement.delay == pytest.approx(10, abs=0.1)
    assert states_of(settlement) == {"a": "done", "b": "retry"}
    assert [each["message"] for each in settlement.errors] == ["boom"]


def test_the_event_is_ready_when_the_first_of_its_handlers_is(handlers):
    handlers("a", "b", "c")
    progress = Progress(claimed())
    progress.fail("a", BOOM, LATER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    progress.fail("c", Retry(delay=400), PATIENT, 0.1)
    assert progress.settlement().delay == pytest.approx(10, abs=0.1)


def test_some_dead_and_some_done_is_completed_with_errors(handlers):
    """M5, M13, M19."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", BOOM, NEVER, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    assert states_of(settlement) == {"a": "done", "b": "dead"}
    assert settlement.dead_handler == "b"
    assert settlement.error_type == "ValueError"
    assert settlement.error_fingerprint == fingerprint(settlement.errors[0])


def test_all_dead_is_failed(handlers):
    """M5."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", KeyError("k"), NEVER, 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == "a"
    assert settlement.error_type == "ValueError"


def test_all_discarded_is_discarded(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    progress.fail("b", Discard("spam"), PATIENT, 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.DISCARDED
    assert states_of(settlement) == {"a": "discarded", "b": "discarded"}
    assert settlement.error_type == "django_eventbus.exceptions.Discard"


def test_discarded_beside_done_is_completed_with_errors(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", Discard("spam"), PATIENT, 0.1)
    assert progress.settlement().status == LogStatus.COMPLETED_WITH_ERRORS


def test_discarded_beside_dead_is_failed(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    progress.fail("b", BOOM, NEVER, 0.1)
    assert progress.settlement().status == LogStatus.FAILED


def test_a_dead_handler_does_not_end_the_event_while_another_waits(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "dead", "b": "retry"}


def test_the_verdict_may_be_asked_for_twice(handlers):
    """A group that is rolled back asks again."""
    handlers("a")
    progress = Progress(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    assert progress.settlement() == progress.settlement()


def test_what_was_rolled_back_never_happened(handlers):
    handlers("a")
    progress = Progress(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.forget()
    progress.succeed("a", 0.1)
    assert progress.settlement() == Completed(7)


# -- handlers still to run under this claim


def test_while_handlers_are_to_run_the_claim_is_kept(handlers):
    handlers("a", "out")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Progressed)
    assert states_of(settlement) == {"a": "done"}


def test_what_is_committed_is_not_owed_any_more(handlers):
    handlers("a", "out")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    told = progress.commit()
    assert [each.handler for each in told] == ["a"]
    assert progress.commit() == []
    assert names(progress.atomic) == []
    assert names(progress.outside) == ["out"]
    progress.succeed("out", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert states_of(settlement) == {"a": "done", "out": "done"}


def test_a_failure_before_the_last_handler_is_kept_until_that_has_run(handlers):
    handlers("a", "out")
    progress = Progress(claimed())
    progress.fail("a", BOOM, PATIENT, 0.1)
    assert isinstance(progress.settlement(), Progressed)
    progress.commit()
    progress.succeed("out", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "retry", "out": "done"}
    assert settlement.delay == pytest.approx(10, abs=0.1)


# -- later deliveries


def test_only_who_is_due_is_called_again(handlers):
    """A failing handler is retried alone."""
    handlers("done", "due", "early", "dead", "new", "out-due", "out-done")
    progress = Progress(
        claimed(
            {
                "done": DONE,
                "due": waits(seconds=-1),
                "early": waits(seconds=60),
                "dead": DEAD,
                "out-due": waits(seconds=0),
                "out-done": DONE,
            },
            [error_of("due")],
        )
    )
    assert names(progress.atomic) == ["due", "new"]
    assert names(progress.outside) == ["out-due"]


def test_a_retry_that_succeeds_completes_the_event_and_keeps_its_story(handlers):
    """M28."""
    handlers("a", "b")
    progress = Progress(claimed({"a": DONE, "b": waits(seconds=-1)}, [error_of("b")]))
    progress.succeed("b", 0.1)
    settlement = progress.settlement()
    assert settlement == Finished(
        row_id=7,
        status=LogStatus.COMPLETED,
        deliveries={"a": DONE, "b": settlement.deliveries["b"]},
        errors=[error_of("b")],
    )
    b = settlement.deliveries["b"]
    assert (b["state"], b["failures"], b["seconds"]) == ("done", 1, 0.1)
    assert settlement.dead_handler == ""
    assert settlement.error_type == ""


def test_a_handler_that_is_done_is_told_with_its_own_end_not_that_of_the_last(handlers):
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 2.0)
    progress.fail("b", BOOM, RetryPolicy(), 60.0)
    done = progress.settlement().deliveries["a"]
    (error,) = progress.settlement().errors
    between = datetime.fromisoformat(error["at"]) - datetime.fromisoformat(done["at"])
    assert between.total_seconds() == 60
    assert done["seconds"] == 2.0


def test_what_is_done_is_told_only_of_events_that_did_not_go_smoothly(handlers):
    handlers("a")
    progress = Progress(claimed())
    progress.succeed("a", 2.0)
    assert progress.settlement() == Completed(7)


def test_who_is_not_due_yet_is_waited_for(handlers):
    handlers("a", "b")
    progress = Progress(claimed({"a": waits(seconds=-1), "b": waits(seconds=60)}, [error_of("a")]))
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.delay == pytest.approx(60, abs=0.1)
    assert states_of(settlement) == {"a": "done", "b": "retry"}


def test_failures_are_counted_over_deliveries_until_the_policy_ends(handlers):
    """M18."""
    handlers("a")
    progress = Progress(claimed())
    policy = RetryPolicy(max_retries=2, base_delay=1, jitter=0)
    delays = []
    while True:
        progress.fail("a", BOOM, policy, 0.1)
        settlement = progress.settlement()
        if isinstance(settlement, Finished):
            break
        delays.append(round(settlement.delay))
        progress = again(settlement)
    assert delays == [1, 2]
    assert settlement.status == LogStatus.FAILED
    assert settlement.deliveries == {"a": {"state": "dead", "failures": 3}}
    assert [each["attempt"] for each in settlement.errors] == [1, 2, 3]


def test_the_attempt_of_a_handler_is_its_own_and_counts_crashes(handlers):
    handlers("a", "b")
    progress = Progress(claimed({"a": waits(seconds=-1, failures=3)}, crashes=2, attempts=9))
    assert progress.attempt_of("a") == 6
    assert progress.attempt_of("b") == 3


def test_all_errors_of_all_attempts_are_kept_in_order(handlers):
    """M28."""
    handlers("a", "b")
    before = [error_of("a", 1), error_of("b", 1), error_of("a", 2)]
    progress = Progress(
        claimed({"a": waits(seconds=-1, failures=2), "b": waits(seconds=-1)}, before)
    )
    progress.fail("a", ValueError("a 3"), NEVER, 0.1)
    progress.fail("b", ValueError("b 2"), NEVER, 0.1)
    messages = [each["message"] for each in progress.settlement().errors]
    assert messages == ["a 1", "b 1", "a 2", "a 3", "b 2"]


def test_an_event_that_crashed_its_worker_keeps_that_error_when_it_completes(handlers):
    """M28."""
    handlers("a")
    lost = error_of("", 1) | {"type": "WorkerLost"}
    progress = Progress(claimed(None, [lost], crashes=1))
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert settlement.errors == [lost]


@pytest.mark.parametrize("delay", [1e9, 1e12, 1e18, 1e300, float("inf"), float("nan"), "soon"])
def test_an_impossible_wait_asked_for_by_a_handler_does_not_break_the_settlement(handlers, delay):
    """Settling a failure must not fail on the failure's own data, or the event never ends."""
    handlers("a")
    progress = Progress(claimed())
    try:
        raise Retry(delay=delay)
    except Exception as error:
        progress.fail("a", error, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert 0 <= settlement.delay < float("inf")
    NOW + timedelta(seconds=settlement.delay)  # is a date


# -- handlers that come and go


def test_nobody_handles_it_is_told_apart_from_everybody_did():
    """M12."""
    assert Progress(claimed()).unanswered() == [NO_HANDLER]


def test_an_event_nobody_handles_is_completed_where_that_is_no_failure():
    """M12: with UNHANDLED="complete" the deliverer fails nobody for it."""
    assert Progress(claimed()).settlement() == Completed(7)


def test_an_event_nobody_handles_is_tried_again_and_then_dead():
    """M12."""
    progress = Progress(claimed())
    progress.fail(NO_HANDLER, BOOM, PATIENT, 0.0)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    progress = again(settlement)
    assert progress.unanswered() == [NO_HANDLER]
    progress.fail(NO_HANDLER, BOOM, RetryPolicy(max_retries=1), 0.0)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == NO_HANDLER


def test_an_event_nobody_handled_is_completed_by_a_handler_that_joined(handlers):
    """M12: deployed late, nothing is lost, and nothing goes in circles."""
    handlers("late")
    progress = Progress(claimed({NO_HANDLER: waits(seconds=-1)}, [error_of(NO_HANDLER)]))
    assert names(progress.atomic) == ["late"]
    assert progress.unanswered() == []
    progress.succeed("late", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.COMPLETED


def test_a_handler_that_joined_does_not_wait_for_the_next_look_for_one(handlers):
    """M12."""
    handlers("late")
    progress = Progress(claimed({NO_HANDLER: waits(seconds=600)}, [error_of(NO_HANDLER)]))
    assert names(progress.atomic) == ["late"]
    progress.fail("late", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.delay == pytest.approx(10, abs=0.1)


def test_a_handler_that_vanished_is_still_owed_the_event(handlers):
    handlers("a")
    progress = Progress(claimed({"a": DONE, "gone": waits(seconds=-1)}, [error_of("gone")]))
    assert progress.unanswered() == ["gone"]
    progress.fail("gone", BOOM, PATIENT, 0.0)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "done", "gone": "retry"}


def test_a_handler_that_vanished_is_not_asked_for_before_it_is_due(handlers):
    handlers("a")
    progress = Progress(claimed({"gone": waits(seconds=60), "a": waits(seconds=-1)}))
    assert progress.unanswered() == []


@pytest.mark.parametrize("state", [DONE, DEAD, DISCARDED])
def test_a_handler_that_vanished_when_it_was_through_is_not_missed(handlers, state):
    handlers("a")
    assert Progress(claimed({"gone": state, "a": waits(seconds=-1)})).unanswered() == []


def test_a_handler_that_vanished_for_good_is_a_dead_letter_with_its_name(handlers):
    handlers("a")
    progress = Progress(claimed({"a": DONE, "gone": waits(seconds=-1)}, [error_of("gone")]))
    progress.fail("gone", BOOM, NEVER, 0.0)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    assert settlement.dead_handler == "gone"


def test_when_all_handlers_vanished_those_that_are_owed_are_missed_and_not_anybody():
    progress = Progress(claimed({"gone": waits(seconds=-1), "also": DONE}))
    assert progress.unanswered() == ["gone"]


def test_a_handler_that_joined_while_the_event_waited_has_its_turn(handlers):
    handlers("a", "late")
    progress = Progress(claimed({"a": waits(seconds=-1)}, [error_of("a")]))
    assert names(progress.atomic) == ["a", "late"]
    progress.succeed("a", 0.1)
    progress.succeed("late", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert states_of(settlement) == {"a": "done", "late": "done"}


def test_a_handler_that_joined_under_way_has_its_turn_at_once(handlers):
    """It registered between the claim and the verdict."""
    handlers("a")
    progress = Progress(claimed({"a": waits(seconds=-1)}, [error_of("a")]))
    handlers("late")
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.delay == 0
    assert names(again(settlement).atomic) == ["late"]


def test_a_handler_that_left_under_way_is_not_waited_for(handlers):
    handlers("a", "b")
    progress = Progress(claimed({"a": DONE, "b": waits(seconds=-1)}, [error_of("b")]))
    registry.remove(registry.get("a").id)
    progress.succeed("b", 0.1)
    assert progress.settlement().status == LogStatus.COMPLETED


# -- all handlers of an event together


@pytest.fixture
def together(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}


def test_together_one_failure_postpones_all(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.halted = True  # what the deliverer notes when it has rolled them all back
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.delay == pytest.approx(10, abs=0.1)
    assert states_of(settlement) == {"b": "retry"}
    assert names(again(settlement).atomic) == ["a", "b"]


def test_together_one_dead_handler_fails_the_event(handlers, together):
    """M10: all or nothing, so nothing."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.halted = True
    progress.fail("b", BOOM, NEVER, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == "b"


def test_together_one_discard_discards_the_event(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.halted = True
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    assert progress.settlement().status == LogStatus.DISCARDED


def test_together_all_done_is_completed(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.succeed("a", 0.1)
    progress.succeed("b", 0.1)
    assert progress.settlement() == Completed(7)


def test_together_is_not_completed_while_one_of_them_is_not_due(handlers, together):
    """M10: the one that failed waits, so the others must wait with it."""
    handlers("a", "b")
    progress = Progress(claimed({"b": waits(seconds=60)}, [error_of("b")]))
    if names(progress.atomic) == ["a"]:
        progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert "a" not in states_of(settlement)


def test_together_the_event_waits_for_its_latest_failure(handlers, together):
    """M10: who failed before is due already, but may not run without the others."""
    handlers("a", "b")
    progress = Progress(claimed({"b": waits(seconds=-1)}, [error_of("b")]))
    assert names(progress.atomic) == ["a", "b"]
    progress.halted = True
    progress.fail("a", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert settlement.delay == pytest.approx(10, abs=0.1)
    assert names(again(settlement, seconds=11).atomic) == ["a", "b"]


def test_apart_one_dead_handler_does_not_stop_another_that_waits(handlers):
    """The same as above without M10's option."""
    handlers("a", "b")
    progress = Progress(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    assert isinstance(progress.settlement(), Postponed)


# -- crashes


def test_an_event_that_took_down_too_many_workers_is_failed_as_crashed(handlers):
    """M6."""
    handlers("a", "b")
    errors = [
        error_of("b"),
        error_of("a") | {"type": "WorkerCrashed", "message": "SIGSEGV"},
        error_of("b", 2),
    ]
    settlement = crashed(claimed({"b": waits(seconds=-1, failures=2)}, errors, crashes=3))
    assert settlement.status == LogStatus.FAILED
    assert settlement.error_type == "crashed"
    assert settlement.dead_handler == "a"
    assert settlement.errors == errors
    assert settlement.error_fingerprint == fingerprint(errors[1])


def test_a_crash_without_any_record_is_settled_too():
    """M6."""
    settlement = crashed(claimed(crashes=3))
    assert settlement.status == LogStatus.FAILED
    assert settlement.deliveries is None
    assert settlement.errors == []


# -- every combination

OUTCOMES = {
    "done": lambda progress, name: progress.succeed(name, 0.1),
    "retry": lambda progress, name: progress.fail(name, BOOM, PATIENT, 0.1),
    "dead": lambda progress, name: progress.fail(name, BOOM, NEVER, 0.1),
    "discarded": lambda progress, name: progress.fail(name, Discard("spam"), PATIENT, 0.1),
}
WAYS = sorted(OUTCOMES)


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("third", WAYS)
def test_every_combination_of_three_handlers_has_its_verdict(handlers, first, second, third):
    """M5."""
    handlers("a", "b", "c")
    progress = Progress(claimed())
    ways = dict(zip("abc", (first, second, third), strict=True))
    for name, way in ways.items():
        OUTCOMES[way](progress, name)
    settlement = progress.settlement()
    kinds = set(ways.values())
    if kinds == {"done"}:
        assert settlement == Completed(7)
        return
    assert states_of(settlement) == ways
    assert len(settlement.errors) == sum(way != "done" for way in ways.values())
    if "retry" in kinds:
        assert isinstance(settlement, Postponed)
        assert settlement.delay == pytest.approx(10, abs=0.1)
        return
    assert isinstance(settlement, Finished)
    if "done" in kinds:
        assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    else:
        expected = LogStatus.DISCARDED if kinds == {"discarded"} else LogStatus.FAILED
        assert settlement.status == expected
    assert ways[settlement.dead_handler] in ("dead", "discarded")


# -- held by a gate

GATE = 1000.0


def hold(progress, *names):
    progress.hold([registry.get(name) for name in names], GATE)


def declare(*names, **options):
    for name in names:
        handler("x", name=name, **options)(print)


def test_an_event_of_which_nothing_ran_is_held_as_it_was():
    declare("a", "b")
    progress = Progress(claimed())
    hold(progress, "a", "b")
    assert progress.settlement() == Held(7, GATE)


def test_an_event_of_which_something_ran_is_postponed_with_that():
    declare("a", "b")
    progress = Progress(claimed())
    hold(progress, "b")
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert (settlement.delay, set(settlement.deliveries)) == (GATE, {"a"})


def test_a_retry_of_another_handler_comes_before_the_gate_opens():
    declare("a", "b")
    progress = Progress(claimed({"a": waits(seconds=60)}))
    hold(progress, "b")
    settlement = progress.settlement()
    assert isinstance(settlement, Held)
    assert settlement.delay == pytest.approx(60, abs=1)


def test_the_own_retry_of_a_held_handler_does_not():
    declare("a")
    progress = Progress(claimed({"a": waits(seconds=-5)}))
    hold(progress, "a")
    assert progress.settlement() == Held(7, GATE)


def test_a_gate_before_the_event_itself_holds_everybody():
    declare("a")
    progress = Progress(claimed({"b": waits(seconds=-5)}))
    progress.hold_all(GATE)
    assert progress.unanswered() == []
    assert progress.settlement() == Held(7, GATE)


def test_a_dead_handler_does_not_end_an_event_that_is_still_owed_to_a_held_one():
    declare("a", "b")
    progress = Progress(claimed())
    hold(progress, "b")
    progress.fail("a", BOOM, NEVER, 0.1)
    assert isinstance(progress.settlement(), Postponed)


def test_atomic_handlers_of_one_event_are_held_together(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}
    declare("a", "b")
    progress = Progress(claimed())
    hold(progress, "b")
    assert progress.atomic == []
    assert progress.settlement() == Held(7, GATE)
