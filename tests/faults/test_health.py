"""Health checks while the database is unavailable: the worker is live, but not ready."""

import pytest

from tests.probes import STRICT, addresses, becomes, get, status

pytestmark = pytest.mark.django_db(transaction=True)

OPTIONS = ("--health-port", "0", "--processes", "2")


def test_a_worker_whose_server_stops_is_live_and_not_ready(cluster):
    worker = cluster.start_worker(*OPTIONS)
    becomes(worker, "/readyz", 200)
    cluster.primary.stop("immediate")
    becomes(worker, "/readyz", 503)
    answer = get(addresses(worker)["/readyz"], "/readyz")
    assert "database outage, it claims no events" in answer.text
    assert status(addresses(worker)["/livez"], "/livez") == 200
    cluster.primary.start()
    becomes(worker, "/readyz", 200)
    assert status(addresses(worker)["/livez"], "/livez") == 200


def test_a_worker_without_replies_of_its_server_is_live_and_not_ready(start_worker, proxy):
    """No error shows the outage, and the threads wait longer than their reports may be late."""
    worker = start_worker(
        *OPTIONS, eventbus={"ABANDON_AFTER": 40.0}, env=proxy.environment | STRICT
    )
    becomes(worker, "/readyz", 200)
    proxy.blackhole()
    becomes(worker, "/readyz", 503)
    answer = get(addresses(worker)["/readyz"], "/readyz")
    assert "the database has not answered for" in answer.text
    assert status(addresses(worker)["/livez"], "/livez") == 200
    proxy.heal()
    becomes(worker, "/readyz", 200)
    becomes(worker, "/livez", 200)
