"""Follow the tutorial: write its files, run its commands, compare its output.

A block that starts with the path of a file is that file. A console block is run, and its output
must appear in this order; ``…`` stands for any text. The web server and the worker are real
processes, and the test uses the pages as a browser would.
"""

import html
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from http.cookiejar import CookieJar
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from django.db import connection

from tests.workers import eventually

PAGE = Path(__file__).parent.parent / "docs" / "tutorial" / "index.md"
BLOCK = re.compile(r"```(\w+)\n(.+?)```", flags=re.DOTALL)
FILE = re.compile(r"(?:# |<!-- )(\S+/\S+\.\w+)( \(at the end\))?(?: -->)?\n")
PASSWORD = "correct horse battery staple"

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        connection.vendor != "sqlite", reason="the project of the tutorial is on SQLite"
    ),
]


def pattern(shown):
    """A pattern for lines of the page: any number of spaces, and … for any text."""
    lines = [line for line in shown.splitlines() if line.strip() not in ("", "…")]
    words = (r"[ \t]+".join(re.escape(word) for word in line.split()) for line in lines)
    return re.compile(".*?".join(words).replace("…", ".*?"), flags=re.DOTALL)


class Browser:
    def __init__(self, address):
        self.address = address
        self.cookies = CookieJar()
        self.opener = build_opener(HTTPCookieProcessor(self.cookies))

    def get(self, path):
        with self.opener.open(self.address + path, timeout=10) as answer:
            return answer.read().decode()

    def post(self, path, fields):
        token = next(each.value for each in self.cookies if each.name == "csrftoken")
        data = urlencode([*fields, ("csrfmiddlewaretoken", token)]).encode()
        with self.opener.open(self.address + path, data, timeout=10) as answer:
            return answer.read().decode()

    def text(self, path):
        """The visible text of the page, in one line."""
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", self.get(path))).split())


class Reader:
    """A reader who follows the page."""

    def __init__(self, folder, stack):
        self.folder = folder
        self.stack = stack
        self.blocks = [(each[1], each[2]) for each in BLOCK.finditer(PAGE.read_text())]
        self.logs = {}
        self.read_to = {}
        unset = ("DJANGO_SETTINGS_MODULE", "PYTHONPATH", "PYTHONWARNINGS")
        env = {name: value for name, value in os.environ.items() if name not in unset}
        self.env = {**env, "PYTHONUNBUFFERED": "1", "DJANGO_SUPERUSER_PASSWORD": PASSWORD}
        self.port = free_port()
        self.browser = Browser(f"http://127.0.0.1:{self.port}")

    def follow(self):
        """Execute the next block; return the path of its file, or its commands."""
        language, text = self.blocks.pop(0)
        if language == "console":
            return [self.run(*each) for each in commands(text)]
        if language == "text":
            return self.wait_for("run_event_worker", text)
        path, at_the_end = FILE.match(text).groups()
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((file.read_text() if at_the_end else "") + text)
        return path

    def follow_until(self, last):
        while (done := self.follow()) != last:
            assert self.blocks, f"the page has no {last!r} after {done!r}"

    def run(self, command, shown):
        program, *arguments = command.split()
        if arguments[0] == "-m" or program == ".":
            return command  # The environment exists, with the package installed.
        start = [sys.executable, *arguments]
        if program == "django-admin":
            start = [sys.executable, "-m", "django", *arguments]
        if arguments[1] == "runserver":
            self.leave_running("runserver", [*start, f"127.0.0.1:{self.port}", "--noreload"])
            eventually(self.is_served, lambda: self.logs["runserver"].read_text())
        elif arguments[1] == "run_event_worker":
            self.leave_running("run_event_worker", start)
            self.wait_for("run_event_worker", shown)
        else:
            if "createsuperuser" in arguments:
                start.append("--noinput")
            done = subprocess.run(
                start, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60
            )
            said = done.stdout + done.stderr
            assert done.returncode == 0, said
            assert pattern(shown).search(said), f"{command} said:\n{said}"
        return command

    def leave_running(self, name, start):
        self.logs[name] = self.folder / f"{name}.log"
        self.read_to[name] = 0
        log = self.stack.enter_context(self.logs[name].open("w"))
        process = subprocess.Popen(
            start,
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.stack.callback(stop, process)

    def is_served(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def wait_for(self, name, shown):
        """Wait for this text in the new output of a process."""

        def found():
            return pattern(shown).search(self.logs[name].read_text(), self.read_to[name])

        match = eventually(found, lambda: f"{name} said:\n{self.logs[name].read_text()}")
        self.read_to[name] = match.end()
        return shown


def commands(text):
    """The (command, output) pairs of a console block."""
    for each in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, shown = each.partition("\n")
        yield command, shown


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stop(process):
    """Send Ctrl-C to the process group, which includes the process of the reloader."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


@pytest.fixture
def reader(tmp_path):
    with ExitStack() as stack:
        yield Reader(tmp_path, stack)


@pytest.mark.costly
def test_the_tutorial(reader):
    reader.follow_until(["python manage.py runserver"])
    browser = reader.browser
    browser.get("/")
    browser.post("/", [("quantity", 2), ("total", "9.00")])
    assert "2 for 9.00, counted 0 times; receipt: none" in browser.text("/")

    reader.follow_until([". .venv/bin/activate", "python manage.py run_event_worker"])
    assert "counted 1 times; receipt: 2 at 4.50 each" in browser.text("/")

    browser.post("/", [("quantity", 0), ("total", "0.00")])
    reader.follow()
    assert "0 for 0.00, counted 1 times; receipt: none" in browser.text("/")

    reader.follow_until(["python manage.py dead_events list"])
    reader.follow()
    log_in(browser)
    retry_in_the_admin(browser)
    reader.follow()
    assert "0 for 0.00, counted 1 times; receipt: 0 at 0.00 each" in browser.text("/")

    reader.follow_until(["python manage.py test"])
    assert reader.blocks == []


def log_in(browser):
    browser.get("/admin/login/")
    page = browser.post(
        "/admin/login/?next=/admin/", [("username", "admin"), ("password", PASSWORD)]
    )
    assert "Dead letters" in page


DEAD_LETTERS = "/admin/django_eventbus/deadevent/"


def retry_in_the_admin(browser):
    """Select a dead letter, choose Retry, Go, and confirm."""
    page = browser.get(DEAD_LETTERS)
    (selected,) = re.findall(r'name="_selected_action" value="([^"]+)"', page)
    (action,) = re.findall(r'<option value="([^"]+)">\s*Retry\s*</option>', page)
    question = browser.post(
        DEAD_LETTERS, [("action", action), ("_selected_action", selected), ("index", 0)]
    )
    assert "Retry 1 dead letter?" in question
    path, form = re.search(
        r'<form method="post" action="([^"]+)">(.+?)</form>', question, flags=re.DOTALL
    ).groups()
    hidden = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)">', form)
    browser.post(path, [(name, value) for name, value in hidden if "csrf" not in name])
