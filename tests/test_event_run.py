"""EventRun: the settlement for every combination of handler results."""

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from django_eventbus import Discard, Retry, RetryPolicy, handler
from django_eventbus.errors.failures import fingerprint
from django_eventbus.exceptions import UnreadableEventError
from django_eventbus.models import LogStatus
from django_eventbus.outcomes.endings import exhausted, unsettleable
from django_eventbus.outcomes.event_run import NO_HANDLER, EventRun
from django_eventbus.registry import registry
from django_eventbus.schema.claims import Claim, ClaimedEvent
from django_eventbus.store import Completed, Finished, Held, HeldBy, Postponed, Progressed

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
        "interruptions": 0,
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
    """The state of a handler whose retry is due in this number of seconds."""
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
    """Register handlers of the type ``x`` by name. Names that start with ``out`` are not atomic."""

    def register(*names):
        for name in names:
            handler("x", name=name, atomic=not name.startswith("out"))(lambda event: None)

    return register


def names(owed):
    return [each.name for each in owed]


def states_of(settlement):
    return {name: state["state"] for name, state in settlement.deliveries.items()}


def again(settlement, seconds=1000):
    """The event at its next claim, after the delay."""
    later = claimed(settlement.deliveries, settlement.errors, attempts=2)
    later.started_epoch += seconds
    return EventRun(later)


# -- the first delivery


def test_an_event_is_completed_without_records_when_all_handlers_are_done(handlers):
    """M5."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    progress.succeed("b", 0.1)
    assert progress.settlement() == Completed(7)


def test_all_handlers_are_due_for_a_new_event(handlers):
    handlers("a", "out", "b")
    progress = EventRun(claimed())
    assert names(progress.atomic) == ["a", "b"]
    assert names(progress.outside) == ["out"]
    assert progress.missing_handlers() == []


def test_a_failed_handler_is_postponed_and_the_completed_one_is_recorded(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.row_id == 7
    assert settlement.wait.seconds == pytest.approx(10, abs=0.1)
    assert states_of(settlement) == {"a": "done", "b": "retry"}
    assert [each["message"] for each in settlement.errors] == ["boom"]


def test_the_event_is_due_when_the_first_of_its_handlers_is_due(handlers):
    handlers("a", "b", "c")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, LATER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    progress.fail("c", Retry(delay=400), PATIENT, 0.1)
    assert progress.settlement().wait.seconds == pytest.approx(10, abs=0.1)


def test_an_event_with_dead_and_completed_handlers_is_completed_with_errors(handlers):
    """M5, M13, M19."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", BOOM, NEVER, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    assert states_of(settlement) == {"a": "done", "b": "dead"}
    assert settlement.dead_handler == "b"
    assert settlement.error_type == "ValueError"
    assert settlement.error_fingerprint == fingerprint(settlement.errors[0])


def test_an_event_whose_handlers_are_all_dead_is_failed(handlers):
    """M5."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", KeyError("k"), NEVER, 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == "a"
    assert settlement.error_type == "ValueError"


def test_an_event_whose_handlers_all_discarded_is_discarded(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    progress.fail("b", Discard("spam"), PATIENT, 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.DISCARDED
    assert states_of(settlement) == {"a": "discarded", "b": "discarded"}
    assert settlement.error_type == "django_eventbus.exceptions.Discard"


def test_an_event_with_discarded_and_completed_handlers_is_completed_with_errors(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    progress.fail("b", Discard("spam"), PATIENT, 0.1)
    assert progress.settlement().status == LogStatus.COMPLETED_WITH_ERRORS


def test_an_event_with_discarded_and_dead_handlers_is_failed(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    progress.fail("b", BOOM, NEVER, 0.1)
    assert progress.settlement().status == LogStatus.FAILED


def test_a_dead_handler_does_not_end_the_event_while_another_waits(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "dead", "b": "retry"}


def test_the_settlement_may_be_computed_twice(handlers):
    """A group that is rolled back computes it again."""
    handlers("a")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    assert progress.settlement() == progress.settlement()


def test_a_rolled_back_run_is_not_recorded(handlers):
    handlers("a")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.forget()
    progress.succeed("a", 0.1)
    assert progress.settlement() == Completed(7)


# -- handlers still to run under this claim


def test_the_claim_is_kept_while_handlers_are_still_to_run(handlers):
    handlers("a", "out")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Progressed)
    assert states_of(settlement) == {"a": "done"}


def test_a_committed_handler_is_not_due_again(handlers):
    handlers("a", "out")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    committed = progress.commit()
    assert [each.handler for each in committed] == ["a"]
    assert progress.commit() == []
    assert names(progress.atomic) == []
    assert names(progress.outside) == ["out"]
    progress.succeed("out", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert states_of(settlement) == {"a": "done", "out": "done"}


def test_a_failure_is_kept_until_the_last_handler_has_run(handlers):
    handlers("a", "out")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, PATIENT, 0.1)
    assert isinstance(progress.settlement(), Progressed)
    progress.commit()
    progress.succeed("out", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "retry", "out": "done"}
    assert settlement.wait.seconds == pytest.approx(10, abs=0.1)


# -- later deliveries


def test_only_due_handlers_are_called_again(handlers):
    """A failing handler is retried alone."""
    handlers("done", "due", "early", "dead", "new", "out-due", "out-done")
    progress = EventRun(
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


def test_a_retry_that_succeeds_completes_the_event_and_keeps_its_records(handlers):
    """M28."""
    handlers("a", "b")
    progress = EventRun(claimed({"a": DONE, "b": waits(seconds=-1)}, [error_of("b")]))
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


def test_a_completed_handler_is_recorded_with_its_own_end_time(handlers):
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 2.0)
    progress.fail("b", BOOM, RetryPolicy(), 60.0)
    done = progress.settlement().deliveries["a"]
    (error,) = progress.settlement().errors
    between = datetime.fromisoformat(error["at"]) - datetime.fromisoformat(done["at"])
    assert between.total_seconds() == 60
    assert done["seconds"] == 2.0


def test_an_event_without_failures_has_no_record_of_its_handlers(handlers):
    handlers("a")
    progress = EventRun(claimed())
    progress.succeed("a", 2.0)
    assert progress.settlement() == Completed(7)


def test_an_event_waits_for_a_handler_that_is_not_due_yet(handlers):
    handlers("a", "b")
    progress = EventRun(claimed({"a": waits(seconds=-1), "b": waits(seconds=60)}, [error_of("a")]))
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.wait.seconds == pytest.approx(60, abs=0.1)
    assert states_of(settlement) == {"a": "done", "b": "retry"}


def test_failures_are_counted_over_deliveries_until_the_policy_ends(handlers):
    """M18."""
    handlers("a")
    progress = EventRun(claimed())
    policy = RetryPolicy(max_retries=2, base_delay=1, jitter=0)
    delays = []
    while True:
        progress.fail("a", BOOM, policy, 0.1)
        settlement = progress.settlement()
        if isinstance(settlement, Finished):
            break
        delays.append(round(settlement.wait.seconds))
        progress = again(settlement)
    assert delays == [1, 2]
    assert settlement.status == LogStatus.FAILED
    assert settlement.deliveries == {"a": {"state": "dead", "failures": 3}}
    assert [each["attempt"] for each in settlement.errors] == [1, 2, 3]


def test_the_attempt_number_counts_own_failures_and_crashes(handlers):
    handlers("a", "b")
    progress = EventRun(claimed({"a": waits(seconds=-1, failures=3)}, crashes=2, attempts=9))
    assert progress.attempt_of("a") == 6
    assert progress.attempt_of("b") == 3


def test_all_errors_of_all_attempts_are_kept_in_order(handlers):
    """M28."""
    handlers("a", "b")
    before = [error_of("a", 1), error_of("b", 1), error_of("a", 2)]
    progress = EventRun(
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
    progress = EventRun(claimed(None, [lost], crashes=1))
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert settlement.errors == [lost]


@pytest.mark.parametrize(
    "delay", [1e9, 1e12, 1e300, float("inf"), float("nan"), 10**400, -1, "soon"]
)
def test_an_impossible_delay_of_a_handler_does_not_break_the_settlement(handlers, delay):
    """Settling a failure must not fail because of its data, or the event never ends."""
    handlers("a")
    progress = EventRun(claimed())
    error = Retry()
    error.delay = delay
    progress.fail("a", error, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert 0 <= settlement.wait.seconds < float("inf")
    NOW + timedelta(seconds=settlement.wait.seconds)  # It must be a valid date.


# -- handlers that are added and removed


def test_an_event_without_handlers_is_unanswered():
    """M12."""
    assert EventRun(claimed()).missing_handlers() == [NO_HANDLER]


def test_an_unhandled_event_is_completed_if_the_setting_says_so():
    """M12: with UNHANDLED="complete" no failure is recorded."""
    assert EventRun(claimed()).settlement() == Completed(7)


def test_an_unhandled_event_is_retried_and_then_dead():
    """M12."""
    progress = EventRun(claimed())
    progress.fail(NO_HANDLER, BOOM, PATIENT, 0.0)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    progress = again(settlement)
    assert progress.missing_handlers() == [NO_HANDLER]
    progress.fail(NO_HANDLER, BOOM, RetryPolicy(max_retries=1), 0.0)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == NO_HANDLER


def test_an_unhandled_event_is_completed_by_a_new_handler(handlers):
    """M12: the handler was deployed late."""
    handlers("late")
    progress = EventRun(claimed({NO_HANDLER: waits(seconds=-1)}, [error_of(NO_HANDLER)]))
    assert names(progress.atomic) == ["late"]
    assert progress.missing_handlers() == []
    progress.succeed("late", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.COMPLETED


def test_a_new_handler_does_not_wait_for_the_retry_of_the_unhandled_event(handlers):
    """M12."""
    handlers("late")
    progress = EventRun(claimed({NO_HANDLER: waits(seconds=600)}, [error_of(NO_HANDLER)]))
    assert names(progress.atomic) == ["late"]
    progress.fail("late", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.wait.seconds == pytest.approx(10, abs=0.1)


def test_a_removed_handler_is_still_due(handlers):
    handlers("a")
    progress = EventRun(claimed({"a": DONE, "gone": waits(seconds=-1)}, [error_of("gone")]))
    assert progress.missing_handlers() == ["gone"]
    progress.fail("gone", BOOM, PATIENT, 0.0)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert states_of(settlement) == {"a": "done", "gone": "retry"}


def test_a_removed_handler_is_not_missed_before_it_is_due(handlers):
    handlers("a")
    progress = EventRun(claimed({"gone": waits(seconds=60), "a": waits(seconds=-1)}))
    assert progress.missing_handlers() == []


@pytest.mark.parametrize("state", [DONE, DEAD, DISCARDED])
def test_a_removed_handler_that_was_done_is_not_missed(handlers, state):
    handlers("a")
    assert EventRun(claimed({"gone": state, "a": waits(seconds=-1)})).missing_handlers() == []


def test_an_event_of_a_removed_handler_becomes_a_dead_letter_with_its_name(handlers):
    handlers("a")
    progress = EventRun(claimed({"a": DONE, "gone": waits(seconds=-1)}, [error_of("gone")]))
    progress.fail("gone", BOOM, NEVER, 0.0)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    assert settlement.dead_handler == "gone"


def test_only_due_handlers_are_missed_when_all_handlers_are_removed():
    progress = EventRun(claimed({"gone": waits(seconds=-1), "also": DONE}))
    assert progress.missing_handlers() == ["gone"]


def test_a_handler_registered_while_the_event_waited_is_called(handlers):
    handlers("a", "late")
    progress = EventRun(claimed({"a": waits(seconds=-1)}, [error_of("a")]))
    assert names(progress.atomic) == ["a", "late"]
    progress.succeed("a", 0.1)
    progress.succeed("late", 0.1)
    settlement = progress.settlement()
    assert settlement.status == LogStatus.COMPLETED
    assert states_of(settlement) == {"a": "done", "late": "done"}


def test_a_handler_registered_during_the_run_is_called_at_once(handlers):
    """It was registered between the claim and the settlement."""
    handlers("a")
    progress = EventRun(claimed({"a": waits(seconds=-1)}, [error_of("a")]))
    handlers("late")
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.wait.seconds == 0
    assert names(again(settlement).atomic) == ["late"]


def test_an_event_does_not_wait_for_a_handler_removed_during_the_run(handlers):
    handlers("a", "b")
    progress = EventRun(claimed({"a": DONE, "b": waits(seconds=-1)}, [error_of("b")]))
    registry.remove(registry.get("a").id)
    progress.succeed("b", 0.1)
    assert progress.settlement().status == LogStatus.COMPLETED


# -- all handlers of an event together


@pytest.fixture
def together(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}


def test_one_failure_postpones_all_handlers_of_an_atomic_event(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.halted = True  # The deliverer calls this when it has rolled them all back.
    progress.fail("b", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert settlement.wait.seconds == pytest.approx(10, abs=0.1)
    assert states_of(settlement) == {"b": "retry"}
    assert names(again(settlement).atomic) == ["a", "b"]


def test_one_dead_handler_fails_an_atomic_event(handlers, together):
    """M10: all handlers or none."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.halted = True
    progress.fail("b", BOOM, NEVER, 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Finished)
    assert settlement.status == LogStatus.FAILED
    assert settlement.dead_handler == "b"


def test_one_discard_discards_an_atomic_event(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.halted = True
    progress.fail("a", Discard("spam"), PATIENT, 0.1)
    assert progress.settlement().status == LogStatus.DISCARDED


def test_an_atomic_event_is_completed_when_all_handlers_are_done(handlers, together):
    """M10."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.succeed("a", 0.1)
    progress.succeed("b", 0.1)
    assert progress.settlement() == Completed(7)


def test_an_atomic_event_is_not_completed_while_a_handler_is_not_due(handlers, together):
    """M10: the failed handler waits, so the others must wait with it."""
    handlers("a", "b")
    progress = EventRun(claimed({"b": waits(seconds=60)}, [error_of("b")]))
    if names(progress.atomic) == ["a"]:
        progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert "a" not in states_of(settlement)


def test_an_atomic_event_waits_for_its_latest_retry(handlers, together):
    """M10: a handler that failed earlier is due already, but must not run without the others."""
    handlers("a", "b")
    progress = EventRun(claimed({"b": waits(seconds=-1)}, [error_of("b")]))
    assert names(progress.atomic) == ["a", "b"]
    progress.halted = True
    progress.fail("a", BOOM, PATIENT, 0.1)
    settlement = progress.settlement()
    assert settlement.wait.seconds == pytest.approx(10, abs=0.1)
    assert names(again(settlement, seconds=11).atomic) == ["a", "b"]


def test_without_atomic_events_a_dead_handler_does_not_stop_another(handlers):
    """The same as above without the option of M10."""
    handlers("a", "b")
    progress = EventRun(claimed())
    progress.fail("a", BOOM, NEVER, 0.1)
    progress.fail("b", BOOM, PATIENT, 0.1)
    assert isinstance(progress.settlement(), Postponed)


# -- crashes


def test_an_event_that_crashed_too_many_workers_is_failed_as_crashed(handlers):
    """M6."""
    handlers("a", "b")
    errors = [
        error_of("b"),
        error_of("a") | {"type": "WorkerCrashed", "message": "SIGSEGV"},
        error_of("b", 2),
    ]
    settlement = exhausted(claimed({"b": waits(seconds=-1, failures=2)}, errors, crashes=3))
    assert settlement.status == LogStatus.FAILED
    assert settlement.error_type == "crashed"
    assert settlement.dead_handler == "a"
    assert settlement.errors == errors
    assert settlement.error_fingerprint == fingerprint(errors[1])


def test_an_event_whose_claims_were_lost_too_often_is_failed_as_interrupted(handlers):
    handlers("a")
    settlement = exhausted(claimed(interruptions=5))
    assert (settlement.status, settlement.error_type) == (LogStatus.FAILED, "interrupted")


def test_an_event_may_be_interrupted_a_few_times():
    assert exhausted(claimed(interruptions=4, crashes=2)) is None


@pytest.mark.parametrize(
    "state",
    [
        "handed off",
        {"state": "handed off", "failures": 0},
        {"state": "retry", "failures": 1},
        {"state": "retry", "failures": 1, "due": "tomorrow"},
        {"state": "done"},
    ],
)
def test_delivery_state_of_a_newer_version_is_refused_as_unreadable(handlers, state):
    handlers("a")
    with pytest.raises(UnreadableEventError, match="cannot be read"):
        EventRun(claimed({"a": state}))


def test_the_settlement_of_an_unsettleable_event_keeps_its_state_and_errors():
    event = claimed({"a": {"state": "handed off"}}, [error_of("a")])
    settlement = unsettleable(event, error_of(""))
    assert (settlement.status, settlement.error_type) == (LogStatus.FAILED, "unsettleable")
    assert settlement.deliveries == {"a": {"state": "handed off"}}
    assert settlement.errors == [error_of("a"), error_of("")]


def test_a_crash_without_an_error_record_can_be_settled():
    """M6."""
    settlement = exhausted(claimed(crashes=3))
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
def test_every_combination_of_three_handlers_has_its_settlement(handlers, first, second, third):
    """M5."""
    handlers("a", "b", "c")
    progress = EventRun(claimed())
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
        assert settlement.wait.seconds == pytest.approx(10, abs=0.1)
        return
    assert isinstance(settlement, Finished)
    if "done" in kinds:
        assert settlement.status == LogStatus.COMPLETED_WITH_ERRORS
    else:
        expected = LogStatus.DISCARDED if kinds == {"discarded"} else LogStatus.FAILED
        assert settlement.status == expected
    assert ways[settlement.dead_handler] in ("dead", "discarded")


# -- held by a flow control

HELD = HeldBy(5)


def hold(progress, *names):
    progress.hold([registry.get(name) for name in names], HELD)


def declare(*names, **options):
    for name in names:
        handler("x", name=name, **options)(print)


def test_an_event_of_which_no_handler_ran_is_held_unchanged():
    declare("a", "b")
    progress = EventRun(claimed())
    hold(progress, "a", "b")
    assert progress.settlement() == Held(7, HELD)


def test_an_event_of_which_a_handler_ran_is_postponed_with_its_record():
    declare("a", "b")
    progress = EventRun(claimed())
    hold(progress, "b")
    progress.succeed("a", 0.1)
    settlement = progress.settlement()
    assert isinstance(settlement, Postponed)
    assert (settlement.wait, set(settlement.deliveries)) == (HELD, {"a"})


def test_an_event_is_due_for_the_retry_of_another_handler_before_its_hold_ends():
    declare("a", "b")
    progress = EventRun(claimed({"a": waits(seconds=60)}))
    hold(progress, "b")
    settlement = progress.settlement()
    assert isinstance(settlement, Held)
    assert settlement.wait.seconds == pytest.approx(60, abs=1)


def test_a_held_handler_is_not_due_for_its_own_retry():
    declare("a")
    progress = EventRun(claimed({"a": waits(seconds=-5)}))
    hold(progress, "a")
    assert progress.settlement() == Held(7, HELD)


def test_a_pause_of_the_type_holds_all_handlers():
    declare("a")
    progress = EventRun(claimed({"b": waits(seconds=-5)}))
    progress.hold_all(HELD)
    assert progress.missing_handlers() == []
    assert progress.settlement() == Held(7, HELD)


def test_a_dead_handler_does_not_end_an_event_while_another_handler_is_held():
    declare("a", "b")
    progress = EventRun(claimed())
    hold(progress, "b")
    progress.fail("a", BOOM, NEVER, 0.1)
    assert isinstance(progress.settlement(), Postponed)


def test_atomic_handlers_of_one_event_are_held_together(settings):
    settings.EVENTBUS = {"ATOMIC": "event"}
    declare("a", "b")
    progress = EventRun(claimed())
    hold(progress, "b")
    assert progress.atomic == []
    assert progress.settlement() == Held(7, HELD)
