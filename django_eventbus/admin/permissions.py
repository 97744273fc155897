"""Who may do what. Being able to see a page gives nobody the right to change anything on it."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

RETRY = "django_eventbus.retry_deadevent"
EDIT = "django_eventbus.edit_deadevent"
PURGE = "django_eventbus.purge_deadevent"
PAUSE = "django_eventbus.pause_eventgate"
VIEW_PAYLOAD = "django_eventbus.view_payload_eventlog"


def may(request: HttpRequest, *permissions: str) -> bool:
    """For templates and lists: whether to offer it at all."""
    return request.user.is_active and request.user.has_perms(permissions)


def demand(request: HttpRequest, *permissions: str) -> None:
    """For everything that changes something, whatever the page had offered."""
    if not may(request, *permissions):
        raise PermissionDenied
