import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from django_eventbus import admin  # noqa: F401 - as the admin's own discovery does
from django_eventbus.diagnosis import watching

MODELS = (
    "deadevent",
    "eventlog",
    "queuedevent",
    "eventlane",
    "eventworker",
    "flowcontrol",
    "eventschedule",
    "eventreplay",
    "minutestatistics",
)
VIEW = tuple(f"view_{model}" for model in MODELS)

#: The roles and their permissions.
ROLES = {
    "stranger": (),
    "viewer": VIEW,
    "retrier": (*VIEW, "retry_deadevent"),
    "editor": (*VIEW, "edit_deadevent", "view_payload_eventlog"),
    "purger": (*VIEW, "purge_deadevent"),
    "pauser": (*VIEW, "pause_flowcontrol"),
    "replayer": (*VIEW, "start_eventreplay"),
    "planner": (*VIEW, "add_eventschedule", "change_eventschedule", "delete_eventschedule"),
    "chief": None,
}


@pytest.fixture
def client_of(db):
    """A logged-in client for the name of a role."""

    def log_in(role, **options):
        user = User(username=role, is_staff=True, is_superuser=ROLES[role] is None)
        user.set_unusable_password()
        user.save()
        permissions = Permission.objects.filter(codename__in=ROLES[role] or ())
        assert len(permissions) == len(ROLES[role] or ())
        user.user_permissions.set(permissions)
        client = Client(**options)
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def chief(client_of):
    return client_of("chief")


def url(name, *args, query=""):
    """Reverse an admin URL, for example ``deadevent_changelist``."""
    return reverse(f"admin:django_eventbus_{name}", args=args) + query


@pytest.fixture(autouse=True)
def unexamined(monkeypatch):
    """Show no test the results of an earlier examination by event_doctor's checks."""
    monkeypatch.setattr(watching, "_last", {})
