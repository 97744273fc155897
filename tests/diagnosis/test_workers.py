"""Checks of the workers: each finds its fault, and is ok without it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from django_eventbus import handler, publish
from django_eventbus.flow.fleet import digest_of, known_here
from django_eventbus.models import EventWorker
from django_eventbus.store import store_for
from django_eventbus.worker.registration import WorkerOptions, new_registration
from tests.bus import drain
from tests.workers import LONG_AGO

pytestmark = pytest.mark.django_db


@pytest.fixture
def worker(store):
    """A live worker with the code and the settings of this process."""
    registration = new_registration(WorkerOptions(using="default", queues=("default",)))
    store.register(registration)
    handlers = known_here()
    store.note_handlers(registration.pk, handlers, digest_of(handlers))
    return EventWorker.objects.get()


WORKER_CHECKS = ["EB001", "EB002", "EB003", "EB004", "EB005", "EB007"]


@pytest.mark.parametrize("check_id", WORKER_CHECKS)
def test_a_live_worker_of_this_deployment_is_ok(check_id, diagnose, worker):
    assert diagnose(check_id).verdict == "ok"


def test_no_worker(diagnose):
    found = diagnose("EB001")
    assert found.verdict == "fail"
    assert found.results[0].fix == "manage.py run_event_worker"


def test_workers_that_sent_no_heartbeat_for_long(diagnose, worker):
    EventWorker.objects.update(renewed_at=LONG_AGO, expires_at=LONG_AGO)
    assert "no worker has renewed its registration for" in diagnose("EB001").results[0].summary
    assert diagnose("EB007").verdict == "warn"


def test_celery_drains_need_no_worker(diagnose, settings):
    settings.EVENTBUS = {"CELERY_DRAIN": True}
    assert diagnose("EB001").verdict == diagnose("EB002").verdict == "ok"


def test_a_queue_that_no_worker_serves(diagnose, settings, worker):
    settings.EVENTBUS = {"QUEUES": ("default", "mail")}
    (result,) = diagnose("EB002").results
    assert result.verdict == "fail"
    assert result.fix == "manage.py run_event_worker --queues mail"


def test_a_worker_with_other_handlers(diagnose, store, worker):
    handler("order.*", name="shop.new")(lambda event: None)
    theirs = {"shop.old": ["order.*"]}
    store.note_handlers(worker.pk, theirs, digest_of(theirs))
    (result,) = diagnose("EB003").results
    assert result.verdict == "warn"
    assert "only they have shop.old" in result.summary
    assert "they lack shop.new" in result.summary
    assert str(worker) in result.fix


def test_a_worker_of_another_version(diagnose, worker):
    EventWorker.objects.update(version="0.0.1, Django 4.2, Python 3.9")
    (result,) = diagnose("EB004").results
    assert result.verdict == "warn"
    assert "0.0.1, Django 4.2, Python 3.9 instead of " in result.summary


def test_a_worker_that_started_before_a_setting_was_changed(diagnose, settings, worker):
    settings.EVENTBUS = {"ABANDON_AFTER": 90.0, "BATCH_SIZE": 7}
    (result,) = diagnose("EB005").results
    assert result.verdict == "warn"
    assert result.summary.endswith("EVENTBUS ABANDON_AFTER")


def test_a_real_worker_writes_its_version_and_settings(settings, store):
    """While a handler runs, the registration of its worker can be read."""
    settings.EVENTBUS = {"ABANDON_AFTER": 90.0}
    seen = []
    handler("a", name="a")(lambda event: seen.append(EventWorker.objects.get()))
    publish("a", 1)
    drain()
    assert list(seen[0].settings_digests) == ["ABANDON_AFTER"]
    assert ", Django " in seen[0].version


@pytest.mark.parametrize(
    ("skew", "verdict"), [(0.5, "ok"), (-10, "warn"), (10, "warn"), (3600, "fail")]
)
def test_clock_skew(diagnose, skew, verdict):
    skewed = store_for(clock=lambda: timezone.now() + timedelta(seconds=skew))
    found = diagnose("EB006", of=skewed)
    assert found.verdict == verdict
    assert ("ahead of" if skew > 0 else "behind") in found.results[0].summary


def test_the_clock_of_the_test_database_agrees(diagnose):
    assert diagnose("EB006").verdict == "ok"
