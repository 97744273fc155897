"""Workers killed at every place where it could matter."""

import signal

import pytest

from django_eventbus.models import EventLog, QueuedEvent
from django_eventbus.publishing import publish, publish_many
from tests.faults import failpoints, invariants
from tests.publishers import Publishers
from tests.shop.models import Effect
from tests.workers import IN_ONE_PROCESS, PATIENT, abandon, eventually

pytestmark = pytest.mark.django_db(transaction=True)

WORKER_PLACES = [each for each in failpoints.PLACES if not each.startswith(("publish", "schedule"))]


def drained():
    return not QueuedEvent.objects.exists()


@pytest.mark.parametrize("place", [each for each in WORKER_PLACES if each != "release.before"])
def test_a_worker_that_dies_at(start_worker, tmp_path, place):
    """F01: nothing is lost, nothing happens twice, no neighbour is charged."""
    publish_many(("fault.effect", n) for n in range(20))
    for n in range(10):
        publish("fault.effect", {}, key=f"k{n % 3}")
    plan = {place.replace(".", "__"): {"do": "kill", "once": str(tmp_path / "once")}}
    # A supervisor gets to its renewal, in a quarter of the time, and then nobody is left to tell.
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


def test_a_publisher_that_dies_with_its_event_inserted_has_published_nothing(tmp_path):
    """F01: nor is anything left of the transaction it was in."""
    plan = failpoints.environment(publish__inserted={"do": "kill", "nth": 3})
    with Publishers(tmp_path, 1, "fault.effect", count=5, env=plan) as publishers:
        said, codes = publishers.publish()
    assert (said, codes) == ([["published"] * 2], [-signal.SIGKILL])
    assert QueuedEvent.objects.count() == Effect.objects.count() == 2
    assert publish("fault.effect", {}), "and nobody is in the way"


@pytest.mark.parametrize("place", ["handler.after", "settle.before_commit"])
def test_the_children_of_a_handler_that_is_killed_vanish_with_it(start_worker, tmp_path, place):
    """F41: the three of the run that made it are there, and no others."""
    publish("process.parent", {})
    plan = {place.replace(".", "__"): {"do": "kill", "once": str(tmp_path / "once")}}
    worker = start_worker(env=failpoints.environment(**plan), eventbus=PATIENT)
    eventually(lambda: EventLog.objects.count() == 4 and drained(), lambda: worker.log)
    assert (tmp_path / "once").exists()
    assert Effect.objects.count() == 3
    invariants.check()
