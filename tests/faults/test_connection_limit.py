"""The server refuses new connections for a while (F33)."""

import pytest
from django.db import connection

from django_eventbus.models import EventWorker
from django_eventbus.publishing.publisher import publish, publish_many
from tests.faults import invariants
from tests.faults.test_failpoints import drained
from tests.faults.test_lost_sessions import sessions, terminate
from tests.shop.models import Effect
from tests.workers import eventually

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

ROLE = "eventbus_one_too_many"
#: Backoff from 0.2 s makes seven attempts in ten seconds; a busy loop would make thousands.
MODERATE = 60


@pytest.fixture
def limited(proxy):
    """A role with a connection limit. It is no superuser, because superusers are exempt."""
    name = connection.settings_dict["NAME"]
    with connection.cursor() as cursor:
        cursor.execute(f"DROP ROLE IF EXISTS {ROLE}")
        cursor.execute(f"CREATE ROLE {ROLE} LOGIN PASSWORD 'x'")
        cursor.execute(f'GRANT ALL ON DATABASE "{name}" TO {ROLE}')
        cursor.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {ROLE}")
        cursor.execute(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {ROLE}")
    yield {"EVENTBUS_TEST_POSTGRES_URL": f"postgresql://{ROLE}:x@{proxy.host}:{proxy.port}/"}
    limit(0)
    terminate(f"usename = '{ROLE}'")
    eventually(lambda: not sessions(f"usename = '{ROLE}'"))
    with connection.cursor() as cursor:
        cursor.execute(f"DROP OWNED BY {ROLE}")
        cursor.execute(f"DROP ROLE {ROLE}")


def limit(connections):
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER ROLE {ROLE} CONNECTION LIMIT {connections}")


def test_a_worker_retries_a_full_server_with_backoff(start_worker, proxy, limited):
    worker = start_worker(eventbus={"ABANDON_AFTER": 30.0}, env=limited)
    child = worker.wait_until_registered()
    publish("fault.effect", 0)
    eventually(drained, lambda: worker.log)
    limit(0)
    terminate(f"usename = '{ROLE}'")
    before = proxy.accepted
    publish_many(("fault.effect", n) for n in range(10))
    eventually(lambda: worker.log.count("retrying in 3.2 s") >= 1, lambda: worker.log)
    assert proxy.accepted - before < MODERATE, worker.log
    assert worker.process.poll() is None
    limit(-1)
    eventually(drained, lambda: worker.log)
    assert Effect.objects.count() == 11
    assert EventWorker.objects.get().pid == child.pid, worker.log
    invariants.check()
