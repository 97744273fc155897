"""The overview refreshes itself while it is visible."""

import re
import uuid

import pytest
from django.urls import reverse
from playwright.sync_api import expect

from django_eventbus import publish
from django_eventbus.admin.overview import REFRESH_SECONDS
from django_eventbus.models import MinuteStatistics
from django_eventbus.store import store_for

OVERVIEW = reverse("admin:django_eventbus_minutestatistics_changelist")
STATISTICS = reverse("admin:django_eventbus_minutestatistics_statistics")


@pytest.fixture
def overview(browse, chief):
    """The page with a simulated clock, and the requests that it sends."""
    page = browse(chief, reverse("admin:index"))
    page.clock.install()
    page.fetched = []
    page.on("request", lambda request: STATISTICS in request.url and page.fetched.append(request))
    page.goto(OVERVIEW)
    return page


def tile(page, label):
    named = page.get_by_text(label, exact=True)
    return page.locator(".eventbus-tile").filter(has=named).locator(".eventbus-value")


def let_time_pass(page):
    page.clock.run_for(REFRESH_SECONDS * 1000)


def test_the_overview_refreshes_the_statistics(overview):
    expect(tile(overview, "Pending")).to_have_text("0")
    publish("order.placed", {"order": 1, "card": "valid"})
    let_time_pass(overview)
    expect(tile(overview, "Pending")).to_have_text("1")
    expect(overview.get_by_role("status")).to_contain_text("needs attention")


def test_a_hidden_page_does_not_refresh(overview):
    hide(overview, True)
    publish("order.placed", {"order": 1, "card": "valid"})
    for _each in range(3):
        let_time_pass(overview)
    assert overview.fetched == []
    expect(tile(overview, "Pending")).to_have_text("0")
    hide(overview, False)
    expect(tile(overview, "Pending")).to_have_text("1")


def hide(page, hidden):
    """Send the event of a hidden page: headless windows cannot be minimised."""
    page.evaluate(
        """hidden => {
            Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_the_refresh_can_be_paused(overview):
    overview.get_by_role("button", name="Pause refreshing").click()
    let_time_pass(overview)
    assert overview.fetched == []
    publish("order.placed", {"order": 1, "card": "valid"})
    overview.get_by_role("button", name="Resume refreshing").click()
    expect(tile(overview, "Pending")).to_have_text("1")


@pytest.mark.parametrize("stop", ["a[href$='deadevent/']", "summary"])
def test_a_refresh_keeps_the_focus(overview, stop):
    MinuteStatistics.objects.create(
        namespace="default",
        minute=store_for().read_clock().replace(second=0, microsecond=0),
        worker_id=uuid.uuid4(),
        queue="default",
        done=1,
    )
    overview.reload()
    before = overview.locator(f"#eventbus-live {stop}").first
    before.focus()
    publish("order.placed", {"order": 1, "card": "valid"})
    let_time_pass(overview)
    expect(tile(overview, "Pending")).to_have_text("1")
    expect(overview.locator(f"#eventbus-live {stop}").first).to_be_focused()


def test_a_selection_prevents_the_refresh(overview):
    overview.evaluate(
        "document.getSelection().selectAllChildren(document.getElementById('eventbus-attention'))"
    )
    let_time_pass(overview)
    assert overview.fetched == []


def test_without_scripts_the_overview_is_a_plain_page(browse, chief):
    publish("order.placed", {"order": 1, "card": "valid"})
    page = browse(chief, OVERVIEW, java_script_enabled=False)
    expect(tile(page, "Pending")).to_have_text("1")
    expect(page.locator("noscript p")).to_be_visible()
    expect(page.get_by_role("button", name=re.compile("Pause|Resume"))).to_have_count(0)
