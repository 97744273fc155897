"""The permissions of the actions. The permission to view a page allows no action on it."""

from __future__ import annotations

from typing import Any

from django.contrib.admin import AdminSite, ModelAdmin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest

RETRY = "django_eventbus.retry_deadevent"
EDIT = "django_eventbus.edit_deadevent"
PURGE = "django_eventbus.purge_deadevent"
PAUSE = "django_eventbus.pause_flowcontrol"
REPLAY = "django_eventbus.start_eventreplay"
VIEW_PAYLOAD = "django_eventbus.view_payload_eventlog"


def may(request: HttpRequest, *permissions: str) -> bool:
    """Return whether the user has all of these permissions. If not, pages hide the action."""
    return request.user.is_active and request.user.has_perms(permissions)


def demand(request: HttpRequest, *permissions: str) -> None:
    """Raise PermissionDenied if the user lacks one of these permissions.

    Call this function before each change.
    """
    if not may(request, *permissions):
        raise PermissionDenied


def page_for(request: HttpRequest, site: AdminSite, model: type[Any]) -> ModelAdmin[Any] | None:
    """Return the ModelAdmin of a model.

    Return None if the model is not registered or the user may not view its rows.
    """
    if not site.is_registered(model):
        return None
    page = site.get_model_admin(model)
    return page if page.has_view_permission(request) else None
