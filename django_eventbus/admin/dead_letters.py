"""Dead letters: the list, the groups by error, and the actions retry, edit and purge."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import DELETION
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import QuerySet
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.utils.crypto import constant_time_compare, salted_hmac
from django.utils.html import escape, format_html_join
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_eventbus import dead_letters
from django_eventbus.admin import audit, paging
from django_eventbus.admin.bulk import BulkAction, BulkMixin, BulkRun
from django_eventbus.admin.event_page import EventPageMixin
from django_eventbus.admin.filters import (
    DeadStatusFilter,
    GroupFilter,
    HandlerFilter,
    QueueFilter,
    ReplayFilter,
    number_range,
    time_range,
)
from django_eventbus.admin.lists import EventChangeList
from django_eventbus.admin.payloads import MisplacedSecret, Redaction, as_text
from django_eventbus.admin.replay_action import ReplayActionMixin, replay_events
from django_eventbus.errors.failures import recorded
from django_eventbus.errors.text import one_line
from django_eventbus.exceptions import EventBusError
from django_eventbus.models import DeadEvent
from django_eventbus.schema.deliveries import DONE, readable
from django_eventbus.schema.payloads import encode
from django_eventbus.store import store_for

GROUPS_SHOWN = 20


class RateForm(forms.Form):
    per_minute = forms.IntegerField(
        label=gettext_lazy("Events per minute"), min_value=1, max_value=100_000, initial=60
    )


def _retry(event_ids: Sequence[uuid.UUID], run: BulkRun) -> int:
    return dead_letters.retry(event_ids, by=run.by)


def _retry_at_rate(event_ids: Sequence[uuid.UUID], run: BulkRun) -> int:
    """Retry a batch with a delay, so that all batches of the run together keep the rate."""
    per_minute = run.options["per_minute"]
    turn = run.done * 60 / per_minute
    return dead_letters.retry(
        event_ids,
        per_minute=per_minute,
        delay=max(0.0, turn - run.seconds_since_start),
        by=run.by,
    )


def _purge(event_ids: Sequence[uuid.UUID], run: BulkRun) -> int:
    return dead_letters.purge(event_id=event_ids)


NOT_DEAD = gettext_lazy("locked by another operator, or no longer dead")

BULK_ACTIONS = (
    BulkAction(
        name="retry",
        permission="retry",
        label=gettext_lazy("Retry"),
        label_all=gettext_lazy("Retry all matching"),
        question=ngettext_lazy(
            "Retry %(count)s dead letter?", "Retry %(count)s dead letters?", "count"
        ),
        result=ngettext_lazy("Retried %(count)s event", "Retried %(count)s events", "count"),
        skip_reason=NOT_DEAD,
        perform=_retry,
    ),
    BulkAction(
        name="retry_later",
        permission="retry",
        label=gettext_lazy("Retry at a limited rate"),
        label_all=gettext_lazy("Retry all matching at a limited rate"),
        question=ngettext_lazy(
            "Retry %(count)s dead letter at a limited rate?",
            "Retry %(count)s dead letters at a limited rate?",
            "count",
        ),
        result=ngettext_lazy(
            "Scheduled %(count)s event for a retry",
            "Scheduled %(count)s events for a retry",
            "count",
        ),
        skip_reason=NOT_DEAD,
        perform=_retry_at_rate,
        form=RateForm,
    ),
    BulkAction(
        name="purge",
        permission="purge",
        label=gettext_lazy("Purge"),
        label_all=gettext_lazy("Purge all matching"),
        question=ngettext_lazy(
            "Purge %(count)s dead letter?", "Purge %(count)s dead letters?", "count"
        ),
        result=ngettext_lazy("Purged %(count)s event", "Purged %(count)s events", "count"),
        skip_reason=NOT_DEAD,
        warning=gettext_lazy("The events are deleted permanently, with their payloads and errors."),
        perform=_purge,
        is_final=True,
        flag=DELETION,
    ),
)


class PayloadForm(forms.Form):
    """A form to edit a payload as text, with placeholders for sensitive values.

    ``before`` is a hash of the payload that the page showed.
    """

    payload = forms.CharField(
        label=gettext_lazy("Payload"),
        strip=False,
        widget=forms.Textarea(attrs={"class": "eventbus-edit", "rows": 24, "spellcheck": "false"}),
    )
    before = forms.CharField(widget=forms.HiddenInput)

    def __init__(self, original: Any, data: Any = None) -> None:
        self.original = original
        self.redaction = Redaction(original)
        initial = {"payload": as_text(self.redaction.public), "before": _seal(original)}
        super().__init__(data, initial=initial)

    def clean_payload(self) -> Any:
        try:
            return self.redaction.restored(json.loads(self.cleaned_data["payload"]))
        except MisplacedSecret as error:
            raise ValidationError(
                _("“%(dots)s” is the placeholder of a hidden value, only valid in a hidden field.")
                % {"dots": error}
            ) from None
        except json.JSONDecodeError as error:
            text = _("The payload is not valid JSON: %(why)s")
            raise ValidationError(text % {"why": error}) from None
        except (ValueError, RecursionError) as error:
            text = _("The payload cannot be parsed: %(why)s")
            raise ValidationError(text % {"why": error}) from None

    def clean_before(self) -> str:
        """Refuse the form if the payload has changed since the page was opened.

        The numbers of the placeholders are valid only for the payload that the page showed.
        """
        before: str = self.cleaned_data["before"]
        if not constant_time_compare(before, _seal(self.original)):
            raise ValidationError(
                _("The payload has changed since this page was opened. Open the page again.")
            )
        return before


def _seal(payload: Any) -> str:
    return salted_hmac("django_eventbus.edit", encode(payload), algorithm="sha256").hexdigest()


@admin.action(permissions=["edit"], description=gettext_lazy("Edit payload and retry"))
def edit(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> Any:
    """Open the edit form. The form edits one dead letter at a time, because payloads differ."""
    chosen = list(rows.values_list("pk", flat=True)[:2])
    if len(chosen) == 1:
        return HttpResponseRedirect(model_admin.url_of("edit", chosen[0]))
    one = _("Select exactly one dead letter to edit its payload.")
    model_admin.message_user(request, one, messages.WARNING)
    return None


class DeadEventChangeList(EventChangeList):
    @property
    def may_sort(self) -> bool:
        """Also sort the dead copies of a replay, whose index has another order than the list."""
        return super().may_sort or ReplayFilter.parameter_name in self.params


class DeadEventAdminMixin(EventPageMixin, ReplayActionMixin, BulkMixin):
    bulk_actions = BULK_ACTIONS
    actions = (edit, replay_events)
    list_display = (
        "age",
        "shown_type",
        "shown_key",
        "shown_handler",
        "shown_error",
        "attempts",
        "shown_status",
    )
    list_display_links = ("shown_type",)
    list_columns = (
        "event_id",
        "finished_at",
        "type",
        "key",
        "dead_handler",
        "error_type",
        "attempts",
        "status",
    )
    ordering = ("-finished_at", "-id")
    choice_filters = (DeadStatusFilter, QueueFilter, HandlerFilter, GroupFilter, ReplayFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("finished_at", time_range(gettext_lazy("time of failure"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[EventChangeList]:
        return DeadEventChangeList

    @admin.display(description=gettext_lazy("handler"))
    def shown_handler(self, event: DeadEvent) -> str:
        return one_line(event.dead_handler)

    @admin.display(description=gettext_lazy("error"))
    def shown_error(self, event: DeadEvent) -> str:
        """Return the error type, with allowed line breaks after dots, because names are long."""
        *modules, name = one_line(event.error_type).split(".")
        return format_html_join("", "{}.<wbr>", ((each,) for each in modules)) + escape(name)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> Any:
        context = {"groups_url": self.url_of("groups"), **(extra_context or {})}
        return super().changelist_view(request, context)

    def get_urls(self) -> list[Any]:
        return [
            self.route("groups/", self.groups_view, "groups"),
            self.route("<int:pk>/retry/", self.retry_view, "retry"),
            self.route("<int:pk>/edit/", self.edit_view, "edit"),
            *super().get_urls(),
        ]

    def groups_view(self, request: HttpRequest) -> HttpResponse:
        self.demand_view(request)
        page = _page_number(request)
        start = (page - 1) * GROUPS_SHOWN
        # Read one group more than the page shows, to find out whether there is another page.
        found = dead_letters.groups(
            GROUPS_SHOWN + 1,
            start,
            count_at_most=paging.MOST_COUNTED + 1,
            among=self.get_queryset(request) if self.is_narrowed(request) else None,
        )
        return self.page(
            request,
            "groups",
            title=_("Dead letters by error"),
            groups=[self._shown_group(request, group) for group in found[:GROUPS_SHOWN]],
            previous=page - 1,
            next=page + 1 if len(found) > GROUPS_SHOWN else 0,
            most_groups=paging.grouped(dead_letters.MOST_GROUPS) if found.is_capped else "",
        )

    def _shown_group(self, request: HttpRequest, group: dead_letters.Group) -> dict[str, Any]:
        letter = group.latest
        errors = [
            each for each in recorded(letter.errors) if each["handler"] == letter.dead_handler
        ]
        query = f"?{urlencode({'group': group.fingerprint})}"
        return {
            "handler": one_line(letter.dead_handler),
            "error": one_line(letter.error_type),
            "message": one_line(errors[-1]["message"]) if errors else "",
            "count": paging.Capped(group.count),
            "first_at": group.first_at,
            "last_at": group.last_at,
            "list_url": self.url_of("changelist") + query,
            "actions": self.action_links(request, query),
        }

    def retry_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Retry all unfinished handlers of a dead letter, or only the handler in the request."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        letter = self._letter(request, pk, self.has_retry_permission)
        handler = request.POST.get("handler") or None
        if handler is not None and handler not in _unfinished_handlers(letter):
            raise Http404
        with transaction.atomic(using=store_for().using):
            by = request.user.get_username()
            retried = dead_letters.retry(letter, only=handler, by=by) == 1
            if retried:
                one = _("retried for handler %(handler)s") % {"handler": handler}
                self._record_retry(request, letter, one if handler else _("retried"))
        return self._report_retry(request, letter, retried)

    def edit_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        letter = self._letter(request, pk, self.has_edit_permission)
        form = PayloadForm(letter.payload, request.POST if request.method == "POST" else None)
        if form.is_valid():
            try:
                with transaction.atomic(using=store_for().using):
                    by = request.user.get_username()
                    edited = dead_letters.edit(letter, form.cleaned_data["payload"], by=by)
                    if edited:
                        self._record_retry(request, letter, _("edited and retried"))
            except EventBusError as error:
                form.add_error("payload", one_line(str(error)))
            else:
                return self._report_retry(request, letter, edited)
        return self.page(
            request,
            "edit",
            title=_("Edit payload and retry"),
            subtitle=one_line(letter.type),
            form=form,
            event_url=self.url_of("change", pk),
        )

    def _letter(
        self, request: HttpRequest, pk: int, is_allowed: Callable[[HttpRequest], bool]
    ) -> DeadEvent:
        self.demand_view(request)
        if not is_allowed(request):
            raise PermissionDenied
        letter: DeadEvent | None = self.event_of(request, str(pk))
        if letter is None:
            raise Http404
        return letter

    def _record_retry(self, request: HttpRequest, letter: DeadEvent, what: str) -> None:
        subject = f"{letter.type} {letter.event_id}"
        audit.record(request, DeadEvent, what, subject=subject, object_id=letter.pk)

    def _report_retry(self, request: HttpRequest, letter: DeadEvent, done: bool) -> HttpResponse:
        if done:
            text = _("Retried the event. It is in the queue again.")
            self.message_user(request, text, messages.SUCCESS)
        else:
            text = _(
                "Event not retried: it is no longer a dead letter, or another operator locked it."
            )
            self.message_user(request, text, messages.WARNING)
        return HttpResponseRedirect(self.url_of("change", letter.pk))


def _unfinished_handlers(letter: DeadEvent) -> list[str]:
    states = readable(letter.deliveries)
    return [name for name, state in states.items() if state["state"] != DONE]


def _page_number(request: HttpRequest) -> int:
    asked = request.GET.get("p", "")
    return max(1, int(asked)) if asked.isdecimal() and len(asked) < 6 else 1


@admin.register(DeadEvent)
class DeadEventAdmin(DeadEventAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
