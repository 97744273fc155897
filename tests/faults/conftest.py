import os
import random
import shutil

import pytest
from django.db import connection

from tests.faults import server as servers
from tests.faults.proxy import Pooler, Proxy, server_address


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run the soak first, because it takes longest and other tests can run in parallel."""
    items.sort(key=lambda item: item.name != "test_soak")


@pytest.fixture
def figures(request):
    """Add a line with numbers to the summary of the run."""
    return lambda text: request.node.user_properties.append(("figures", text))


def pytest_terminal_summary(terminalreporter):
    reports = [each for some in terminalreporter.stats.values() for each in some]
    lines = [
        f"{report.location[2]}: {text}"
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, text in report.user_properties
        if name == "figures"
    ]
    if lines:
        terminalreporter.section("faults: what was done")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def seed(figures):
    """The seed of all random choices in a test. EVENTBUS_FAULT_SEED repeats a run."""
    chosen = int(os.environ.get("EVENTBUS_FAULT_SEED") or random.SystemRandom().randrange(10**6))
    figures(f"EVENTBUS_FAULT_SEED={chosen}")
    return chosen


@pytest.fixture(scope="session")
def template():
    """A stopped server with our tables, as a template for copies."""
    if connection.vendor != "postgresql":
        pytest.skip("a PostgreSQL server of its own")
    with servers.directory() as root:
        made = servers.initialized(root)
        made.start(database="postgres").sql(f"CREATE DATABASE {servers.NAME}", database="postgres")
        servers.migrate(servers.address_of(made.sockets))
        made.stop()
        yield made


@pytest.fixture
def cluster(template, tmp_path, django_db_blocker, monkeypatch):
    """A running server for this test only. The models in the test process use it too."""
    with servers.directory() as root:
        made = servers.Cluster(template, root, tmp_path)
        try:
            made.primary.start()
            connection.close()
            here = {"NAME": servers.NAME, "USER": "postgres", "HOST": str(made.address)}
            for name, value in {**here, "PASSWORD": "", "PORT": ""}.items():
                monkeypatch.setitem(connection.settings_dict, name, value)
            with django_db_blocker.unblock():
                yield made
        finally:
            connection.close()
            made.end()


@pytest.fixture
def in_the_end(cluster):
    return cluster.in_the_end


@pytest.fixture
def mariadb(tmp_path, django_db_blocker, monkeypatch):
    """A running MariaDB server for this test only. The models in the test process use it too."""
    if connection.vendor != "mysql":
        pytest.skip("a MariaDB server of its own")
    if not shutil.which("mariadbd") or not shutil.which("mariadb-install-db"):
        pytest.skip("the server's programs are not installed (Debian: mariadb-server)")
    with servers.directory() as root:
        made = servers.MariaDB(root, tmp_path)
        try:
            made.start()
            made.create_tables()
            connection.close()
            here = {"NAME": servers.NAME, "USER": "root", "HOST": "127.0.0.1", "PORT": made.port}
            for name, value in here.items():
                monkeypatch.setitem(connection.settings_dict, name, value)
            with django_db_blocker.unblock():
                yield made
        finally:
            connection.close()
            made.end()


@pytest.fixture
def on_postgresql(transactional_db):
    if connection.vendor != "postgresql":
        pytest.skip("PostgreSQL's sessions and its protocol")


@pytest.fixture
def proxy(on_postgresql):
    with Proxy(server_address()) as proxy:
        yield proxy


@pytest.fixture
def pooler(on_postgresql):
    with Pooler(server_address()) as pooler:
        yield pooler
