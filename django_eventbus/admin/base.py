"""The base class of all admin pages of the event bus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.text import capfirst

from django_eventbus.admin.paging import CappedPaginator, IndexedChangeList
from django_eventbus.admin.permissions import EDIT, PAUSE, PURGE, REPLAY, RETRY, VIEW_PAYLOAD, may
from django_eventbus.conf import settings
from django_eventbus.store import default_alias

try:
    from django.middleware.csp import get_nonce
except ImportError:  # Django before 6.0 has no such function.

    def get_nonce(request: HttpRequest) -> None:  # type: ignore[misc]
        return None


if TYPE_CHECKING:
    Base = admin.ModelAdmin[Any]
else:
    Base = object


class EventBusAdminMixin(Base):
    """An admin page that shows only rows of the project's namespace and has no form to change them.

    The URL of a list may contain only the filters that the list shows.
    """

    paginator = CappedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 50
    list_select_related = False

    class Media:
        css = {"all": ("django_eventbus/eventbus.css",)}

    # -- additional pages

    def route(self, route: str, view: Callable[..., Any], name: str) -> URLPattern:
        """Return a URL pattern for staff users. The view must check all other permissions."""
        return path(route, self.admin_site.admin_view(view), name=self._name(name))

    def url_of(self, name: str, *args: Any) -> str:
        return reverse(f"admin:{self._name(name)}", args=args, current_app=self.admin_site.name)

    def _name(self, name: str) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{name}"

    def page(self, request: HttpRequest, template: str, **context: Any) -> TemplateResponse:
        request.current_app = self.admin_site.name
        common = {
            **self.admin_site.each_context(request),
            "opts": self.opts,
            "media": self.media,
            "list_url": self.url_of("changelist"),
        }
        return TemplateResponse(
            request, f"admin/django_eventbus/{template}.html", {**common, **context}
        )

    def demand_view(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    # -- permissions; by default no form may add, change or delete rows

    def has_retry_permission(self, request: HttpRequest) -> bool:
        return may(request, RETRY)

    def has_edit_permission(self, request: HttpRequest) -> bool:
        return may(request, EDIT, VIEW_PAYLOAD)

    def has_purge_permission(self, request: HttpRequest) -> bool:
        return may(request, PURGE)

    def has_pause_permission(self, request: HttpRequest) -> bool:
        return may(request, PAUSE)

    def has_replay_permission(self, request: HttpRequest) -> bool:
        return may(request, REPLAY)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Accept only the list's own filters from the URL.

        Django accepts lookups on any column. With such a lookup a user could find out a hidden
        payload letter by letter, or run an action with a filter that the page does not show.
        """
        filters = self.get_list_filter(request)
        named = {getattr(each, "parameter_name", None) for each in filters}
        # A project may add the name of a column as a filter. The URL parameters of such a filter
        # begin with the name of the column.
        columns = tuple(f"{each}__" for each in filters if isinstance(each, str))
        ranges = tuple(f"{each[0]}__range__" for each in filters if isinstance(each, tuple))
        return lookup in named or lookup in filters or lookup.startswith(columns + ranges)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[IndexedChangeList]:
        return IndexedChangeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = self.model._default_manager.using(default_alias())
        return rows.filter(namespace=settings.NAMESPACE)

    def is_narrowed(self, request: HttpRequest) -> bool:
        """Return whether the project overrides ``get_queryset()`` with more conditions."""
        ours = EventBusAdminMixin.get_queryset(self, request)
        return bool(self.get_queryset(request).query.where != ours.query.where)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        # The range filters read ``request.csp_nonce``, which django-csp sets. Django's own nonce
        # has another name, so it is copied.
        if not hasattr(request, "csp_nonce"):
            # A nonce is a false value until it is used, so it must be compared with None.
            nonce = get_nonce(request)
            request.csp_nonce = "" if nonce is None else nonce  # type: ignore[attr-defined]
        context = {"title": capfirst(str(self.opts.verbose_name_plural)), **(extra_context or {})}
        return super().changelist_view(request, context)
