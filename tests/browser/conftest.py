"""Real pages in a real browser: Debian's Chromium, or the one that CHROMIUM names.

Run by ``make test-browser``, in a process and with settings of their own.
"""

import os
import shutil
from urllib.parse import urlsplit

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.test import Client

SETTINGS = "tests.browser.settings"
collect_ignore_glob = [] if settings.SETTINGS_MODULE == SETTINGS else ["*.py"]

#: Logs the violations of the policy to the console, which the tests check.
LOG_VIOLATIONS = """
document.addEventListener("securitypolicyviolation", event =>
    console.error(`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
"""


@pytest.fixture(scope="session")
def browser_type_launch_args(browser_type_launch_args):
    return {
        **browser_type_launch_args,
        "executable_path": os.environ.get("CHROMIUM") or shutil.which("chromium"),
        "args": [
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
        ],
    }


@pytest.fixture(scope="session")
def base_url(live_server):
    return live_server.url


@pytest.fixture(autouse=True)
def own_handlers():
    """Register the handlers of this app in the server process."""


@pytest.fixture
def work(start_worker):
    """Run a worker process until no event is ready."""

    def run():
        worker = start_worker("--drain", env={"DJANGO_SETTINGS_MODULE": SETTINGS})
        assert worker.wait() == 0, worker.log

    return run


@pytest.fixture
def chief(transactional_db):
    return User.objects.create_superuser("chief")


@pytest.fixture
def browse(new_context, live_server):
    """Open a page as a user.

    The test fails if the browser logs an error, the policy blocks something, or a page sends a
    request to another origin.
    """
    complaints = []

    def note_message(message):
        if message.type in ("error", "warning"):
            complaints.append(f"{message.type}: {message.text}")

    def note_request(request):
        address = urlsplit(request.url)
        if f"{address.scheme}://{address.netloc}" != live_server.url:
            complaints.append(f"off-origin: {request.url}")

    def open_page(user, url, **options):
        context = new_context(**options)
        context.add_cookies([session_of(user, live_server.url)])
        context.add_init_script(LOG_VIOLATIONS)
        context.on("console", note_message)
        context.on("weberror", lambda error: complaints.append(f"raised: {error.error}"))
        context.on("request", note_request)
        page = context.new_page()
        page.goto(url)
        return page

    yield open_page
    assert complaints == []


def session_of(user, url):
    client = Client()
    client.force_login(user)
    name = settings.SESSION_COOKIE_NAME
    return {"name": name, "value": client.cookies[name].value, "url": url}
