"""Every page: accessibility, and the width of a small window."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from django.urls import reverse

from django_eventbus.models import DeadEvent
from tests.browser.scene import set_the_scene

PAGES = {
    "app": ("app_list", "django_eventbus"),
    "overview": ("django_eventbus_minutestatistics_changelist",),
    "checks": ("django_eventbus_minutestatistics_checks",),
    "dead letters": ("django_eventbus_deadevent_changelist",),
    "groups": ("django_eventbus_deadevent_groups",),
    "confirmation": ("django_eventbus_deadevent_bulk", "retry_later"),
    "queued": ("django_eventbus_queuedevent_changelist",),
    "log": ("django_eventbus_eventlog_changelist",),
    "lanes": ("django_eventbus_eventlane_changelist",),
    "workers": ("django_eventbus_eventworker_changelist",),
    "schedules": ("django_eventbus_eventschedule_changelist",),
    "flow control": ("django_eventbus_flowcontrol_changelist",),
    "replays": ("django_eventbus_eventreplay_changelist",),
    "pause": ("django_eventbus_flowcontrol_pause",),
}
OF_A_LETTER = {
    "event": "django_eventbus_deadevent_change",
    "edit": "django_eventbus_deadevent_edit",
}
#: Parts of every page that come from Django: breadcrumbs and the search box.
NOT_OURS = {"exclude": [[".breadcrumbs"], ["#searchbar"]]}


@pytest.fixture
def urls(work):
    set_the_scene(work)
    letter = DeadEvent.objects.filter(type="order.placed").first()
    pages = {name: reverse(f"admin:{page}", args=args) for name, (page, *args) in PAGES.items()}
    return pages | {
        name: reverse(f"admin:{page}", args=[letter.pk]) for name, page in OF_A_LETTER.items()
    }


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_has_a_serious_accessibility_violation(browse, chief, urls, scheme):
    # The policy would block the scripts of axe.
    page = browse(chief, urls["app"], color_scheme=scheme, bypass_csp=True)
    faults = []
    for name, url in urls.items():
        page.goto(url)
        for fault in Axe().run(page, NOT_OURS, {"preload": False}).response["violations"]:
            if fault["impact"] in ("serious", "critical"):
                faults += [(name, fault["id"], node["html"]) for node in fault["nodes"]]
    assert faults == []


def test_no_page_is_wider_than_a_small_window(browse, chief, urls):
    page = browse(chief, urls["app"], viewport={"width": 390, "height": 800})
    wide = {}
    for name, url in urls.items():
        page.goto(url)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width > 390:
            wide[name] = width
    assert wide == {}
