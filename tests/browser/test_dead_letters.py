"""Work of an operator on dead letters: by mouse, by keyboard, and without JavaScript."""

import json
import re

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from playwright.sync_api import expect

from django_eventbus import publish, publish_many
from django_eventbus.admin import bulk
from django_eventbus.models import DeadEvent, EventLog, LogStatus, QueuedEvent
from tests.admin.people import user_with

LIST = reverse("admin:django_eventbus_deadevent_changelist")
GROUPS = reverse("admin:django_eventbus_deadevent_groups")


@pytest.fixture
def letter(work):
    """An order whose card was declined, three times."""
    publish("order.placed", {"order": 7, "card": "expired"}, key="order:7")
    work()
    return DeadEvent.objects.get()


@pytest.fixture
def thousand(work):
    """A thousand receipts that could not be sent, and one order that does not match them."""
    publish_many(("mail.receipt", {"order": n}) for n in range(1000))
    publish("order.placed", {"order": 7, "card": "expired"})
    work()
    assert DeadEvent.objects.count() == 1001


def status_on(page):
    return page.locator(".eventbus-state").first


def test_a_declined_order_is_corrected_and_completes(browse, chief, letter, work):
    page = browse(chief, LIST)
    row = page.locator("#result_list tbody tr")
    expect(row).to_contain_text("billing.charge")
    expect(row).to_contain_text("CardDeclined")
    row.get_by_role("link", name="order.placed").click()
    expect(status_on(page)).to_have_text("completed with errors")
    expect(page.locator(".eventbus-timeline")).to_contain_text("the bank says: card expired")

    page.get_by_role("link", name="Edit payload and retry").click()
    payload = page.get_by_label("Payload")
    assert json.loads(payload.input_value()) == {"order": 7, "card": "expired"}
    payload.fill('{"order": 7, "card": ')
    page.get_by_role("button", name="Save and retry").click()
    expect(page.get_by_text("not valid JSON")).to_be_visible()
    payload.fill('{"order": 7, "card": "valid"}')
    page.get_by_role("button", name="Save and retry").click()
    expect(page.get_by_text("It is in the queue again.")).to_be_visible()
    expect(status_on(page)).to_have_text("pending")

    work()
    page.reload()
    expect(status_on(page)).to_have_text("completed")
    expect(page.locator(".eventbus-timeline")).to_contain_text('"card": "expired"')
    assert EventLog.objects.get(event_id=letter.event_id).status == LogStatus.COMPLETED


def test_a_thousand_matching_dead_letters_are_retried(browse, chief, thousand, monkeypatch):
    monkeypatch.setattr(bulk, "SECONDS", 0)  # One batch per request shows the progress.
    page = browse(chief, GROUPS)
    expect(page.get_by_role("row").filter(has_text="mail.send")).to_contain_text("1,000")
    page.get_by_role("row").filter(has_text="mail.send").get_by_role("link").first.click()
    page.get_by_role("link", name="Retry all matching…").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Retry 1,000 dead letters?")
    expect(page.get_by_text("TimeoutError in mail.send")).to_be_visible()

    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request))
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("Retried 1,000 events")).to_be_visible()
    assert len(sent) == 3  # One click, and two requests sent by the progress page.
    assert QueuedEvent.objects.filter(type="mail.receipt").count() == 1000
    assert DeadEvent.objects.get().type == "order.placed"
    assert LogEntry.objects.count() == 2


def test_going_back_to_a_stopped_run_does_not_resume_it(browse, chief, thousand, monkeypatch):
    """Chromium asks before it sends a form again, so the navigation type is simulated."""
    monkeypatch.setattr(bulk, "SECONDS", 0)
    page = browse(chief, f"{LIST}?handler=mail.send")
    page.add_init_script("performance.getEntriesByType = () => [{type: 'back_forward'}]")
    page.get_by_role("link", name="Purge all matching").click()
    page.get_by_role("button", name="Purge").click()
    page.wait_for_load_state("networkidle")
    expect(page.get_by_role("status")).to_contain_text("500 of")
    assert DeadEvent.objects.count() == 501


def test_without_scripts_a_button_continues_a_run(browse, chief, thousand, monkeypatch):
    monkeypatch.setattr(bulk, "SECONDS", 0)
    page = browse(chief, f"{LIST}?handler=mail.send", java_script_enabled=False)
    page.get_by_role("link", name="Purge all matching").click()
    page.get_by_role("button", name="Purge").click()
    expect(page.get_by_role("status")).to_contain_text("500 of 1,000 done")
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("button", name="Continue").click()
    expect(page.get_by_text("Purged 1,000 events")).to_be_visible()
    assert DeadEvent.objects.get().type == "order.placed"


def test_without_scripts_chosen_rows_are_retried(browse, chief, letter, work):
    page = browse(chief, LIST, java_script_enabled=False)
    page.locator("#result_list input[type=checkbox]").last.check()
    page.get_by_label("Action:").select_option("Retry")
    page.locator("button[name=index]").click()  # "Go", or "Run" since Django 6.1
    page.get_by_role("button", name="Retry").click()
    expect(page.get_by_text("Retried 1 event")).to_be_visible()
    assert QueuedEvent.objects.get().event_id == letter.event_id


def test_a_dead_letter_can_be_retried_by_keyboard(browse, chief, letter):
    page = browse(chief, LIST)
    tab_to(page, "order.placed")
    page.keyboard.press("Enter")
    expect(status_on(page)).to_be_visible()
    tab_to(page, "Retry")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline != "none"
    page.keyboard.press("Enter")
    expect(page.get_by_text("It is in the queue again.")).to_be_visible()
    assert QueuedEvent.objects.get().event_id == letter.event_id


def tab_to(page, text, at_most=120):
    reached = []
    for _press in range(at_most):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim()"))
        if reached[-1] == text:
            return
    pytest.fail(f"{text} is not among what the keyboard reaches: {reached}")


def test_a_viewer_is_offered_no_action_and_cannot_force_one(browse, letter):
    page = browse(user_with("view_deadevent"), LIST)
    expect(page.get_by_label("Action:")).to_have_count(0)
    expect(page.get_by_role("link", name="Group by error")).to_be_visible()
    offers = re.compile("Retry|Purge|Edit")
    expect(page.get_by_role("link", name=offers)).to_have_count(0)
    page.get_by_role("link", name="order.placed").click()
    expect(page.get_by_text("You do not have permission to view payloads.")).to_be_visible()
    main = page.locator("#content-main")
    expect(main.get_by_role("link", name=offers)).to_have_count(0)
    expect(main.get_by_role("button")).to_have_count(0)

    token = page.evaluate("document.querySelector('#logout-form [name=csrfmiddlewaretoken]').value")
    chosen = {"_selected_action": str(letter.pk), "csrfmiddlewaretoken": token}
    for url, form in {
        reverse("admin:django_eventbus_deadevent_retry", args=[letter.pk]): {},
        reverse("admin:django_eventbus_deadevent_edit", args=[letter.pk]): {"payload": "{}"},
        reverse("admin:django_eventbus_deadevent_bulk", args=["purge"]): {},
        LIST: {"action": "retry"},
    }.items():
        answer = page.request.post(url, form={**chosen, **form})
        assert answer.status == 403, url
        assert "CSRF" not in answer.text()
    assert DeadEvent.objects.get() == letter
