"""The pages render with a theme that has its own templates."""

import pytest
from django.contrib import admin
from django.urls import reverse
from unfold.admin import ModelAdmin

from django_eventbus.admin.dead_letters import DeadEventAdminMixin
from django_eventbus.models import DeadEvent
from tests.test_dead_letters import dead_letter

pytestmark = pytest.mark.django_db

MODELS = ("minutestatistics", "deadevent", "queuedevent", "eventlog", "eventlane", "eventworker")
MORE_MODELS = ("eventschedule", "flowcontrol")


def shown(client, name, *args):
    answer = client.get(reverse(f"admin:{name}", args=args))
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.parametrize("model", [*MODELS, *MORE_MODELS])
def test_every_list_renders(admin_client, model):
    dead_letter()
    assert "unfold" in shown(admin_client, f"django_eventbus_{model}_changelist")


def test_the_pages_of_a_dead_letter_render(admin_client):
    letter = dead_letter(error=KeyError("stock"))
    assert "KeyError" in shown(admin_client, "django_eventbus_deadevent_change", letter.pk)
    assert "KeyError" in shown(admin_client, "django_eventbus_deadevent_groups")
    assert "csrfmiddlewaretoken" in shown(admin_client, "django_eventbus_deadevent_edit", letter.pk)
    assert "Retry 1 dead letter?" in shown(admin_client, "django_eventbus_deadevent_bulk", "retry")
    assert "csrfmiddlewaretoken" in shown(admin_client, "django_eventbus_flowcontrol_pause")


def test_a_project_can_register_the_pages_with_the_classes_of_its_theme(admin_client):
    class ThemedAdmin(DeadEventAdminMixin, ModelAdmin):
        pass

    stock = admin.site._registry[DeadEvent]
    admin.site._registry[DeadEvent] = ThemedAdmin(DeadEvent, admin.site)
    try:
        letter = dead_letter(error=KeyError("stock"))
        assert "KeyError" in shown(admin_client, "django_eventbus_deadevent_changelist")
        assert "KeyError" in shown(admin_client, "django_eventbus_deadevent_change", letter.pk)
    finally:
        admin.site._registry[DeadEvent] = stock
