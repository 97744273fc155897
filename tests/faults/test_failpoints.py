"""Workers killed at every failpoint."""

import signal

import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import failpoints, invariants
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, abandon, eventually

pytestmark = pytest.mark.django_db(transaction=True)

OTHERS = ("publish", "schedule", "start")
WORKER_PLACES = [each for each in failpoints.PLACES if not each.startswith(OTHERS)]


def drained():
    return not QueuedEvent.objects.exists()


@pytest.mark.parametrize("place", [each for each in WORKER_PLACES if each != "release.before"])
def test_no_event_is_lost_when_a_worker_process_dies_at(start_worker, tmp_path, place):
    """F01: no event is lost or handled twice, and no other event is charged."""
    publish_many(("fault.effect", n) for n in range(20))
    for n in range(10):
        publish("fault.effect", {}, key=f"k{n % 3}")
    plan = {place.replace(".", "__"): {"do": "kill", "once": str(tmp_path / "once")}}
    # The supervisor itself dies at its first renewal, after a quarter of ABANDON_AFTER.
    renewing = place == "renew.sent"
    dying = start_worker(
        env=failpoints.environment(**plan), eventbus={"ABANDON_AFTER": 2.0} if renewing else PATIENT
    )
    eventually((tmp_path / "once").exists, lambda: dying.log)
    if renewing:
        dying.wait()
        abandon()
    for _ in range(2):
        start_worker(*IN_ONE_PROCESS, eventbus=PATIENT)
    eventually(drained, lambda: dying.log)
    invariants.check()
    invariants.check_order_of_effects()
    assert Effect.objects.count() == EventLog.objects.filter(status="COMPLETED").count() == 30
    assert EventLog.objects.filter(crashes__gt=1).count() == 0
    dying.signal(signal.SIGTERM)


@pytest.mark.processes
def test_a_publisher_that_dies_before_its_commit_has_published_nothing(tmp_path):
    """F01: its transaction is rolled back."""
    plan = failpoints.environment(publish__inserted={"do": "kill", "nth": 3})
    with Publishers(tmp_path, 1, "fault.effect", count=5, env=plan) as publishers:
        said, codes = publishers.publish()
    assert (said, codes) == ([["published"] * 2], [-signal.SIGKILL])
    assert QueuedEvent.objects.count() == Effect.objects.count() == 2
    assert publish("fault.effect", {}), "no lock of the dead publisher is left"


@pytest.mark.parametrize("place", ["handler.after", "settle.before_commit"])
def test_events_published_by_a_killed_handler_are_rolled_back(start_worker, tmp_path, place):
    """F41: only the three events of the successful run exist."""
    publish("process.parent", {})
    plan = {place.replace(".", "__"): {"do": "kill", "once": str(tmp_path / "once")}}
    worker = start_worker(env=failpoints.environment(**plan), eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 4 and drained(), lambda: worker.log)
    assert (tmp_path / "once").exists()
    assert Effect.objects.count() == 3
    invariants.check()
