"""Dead letters: the list, the groups, and what is done about them."""

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
from django_eventbus.admin.bulk import Act, BulkMixin, Run
from django_eventbus.admin.filters import (
    DeadStatusFilter,
    GroupFilter,
    HandlerFilter,
    QueueFilter,
    number_range,
    time_range,
)
from django_eventbus.admin.payloads import MisplacedSecret, Redaction, as_text
from django_eventbus.admin.story import StoryMixin
from django_eventbus.events import encode
from django_eventbus.exceptions import EventBusError
from django_eventbus.failures import one_line
from django_eventbus.models import DeadEvent
from django_eventbus.store import store_for

GROUPS_SHOWN = 20


class PaceForm(forms.Form):
    per_minute = forms.IntegerField(
        label=gettext_lazy("Events per minute"), min_value=1, max_value=100_000, initial=60
    )


def _retry(event_ids: Sequence[uuid.UUID], run: Run) -> int:
    return dead_letters.retry(event_ids)


def _retry_later(event_ids: Sequence[uuid.UUID], run: Run) -> int:
    per_minute = run.options["per_minute"]
    turn = run.done * 60 / per_minute
    return dead_letters.retry(
        event_ids, per_minute=per_minute, delay=max(0.0, turn - run.seconds_since_start)
    )


def _purge(event_ids: Sequence[uuid.UUID], run: Run) -> int:
    return dead_letters.purge(event_id=event_ids)


ACTS = (
    Act(
        name="retry",
        permission="retry",
        label=gettext_lazy("Retry"),
        label_all=gettext_lazy("Retry all that match"),
        question=ngettext_lazy(
            "Retry %(count)s dead letter?", "Retry %(count)s dead letters?", "count"
        ),
        told=ngettext_lazy("%(count)s event retried", "%(count)s events retried", "count"),
        do=_retry,
    ),
    Act(
        name="retry_later",
        permission="retry",
        label=gettext_lazy("Retry later, at a pace"),
        label_all=gettext_lazy("Retry all later, at a pace"),
        question=ngettext_lazy(
            "Retry %(count)s dead letter at a pace?",
            "Retry %(count)s dead letters at a pace?",
            "count",
        ),
        told=ngettext_lazy(
            "%(count)s event to be retried at its pace",
            "%(count)s events to be retried at their pace",
            "count",
        ),
        do=_retry_later,
        form=PaceForm,
    ),
    Act(
        name="purge",
        permission="purge",
        label=gettext_lazy("Purge"),
        label_all=gettext_lazy("Purge all that match"),
        question=ngettext_lazy(
            "Purge %(count)s dead letter?", "Purge %(count)s dead letters?", "count"
        ),
        told=ngettext_lazy("%(count)s event purged", "%(count)s events purged", "count"),
        warning=gettext_lazy("They are deleted for good, with their payloads and errors."),
        do=_purge,
        is_final=True,
        flag=DELETION,
    ),
)


class PayloadForm(forms.Form):
    """A payload as text, without its secrets; ``before`` tells which payload it was."""

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
                _("“%(dots)s” cannot stand here: hidden values stay in fields that are hidden.")
                % {"dots": error}
            ) from None
        except json.JSONDecodeError as error:
            raise ValidationError(_("This is no JSON: %(why)s") % {"why": error}) from None
        except (ValueError, RecursionError) as error:
            raise ValidationError(_("This cannot be read: %(why)s") % {"why": error}) from None

    def clean_before(self) -> str:
        """The placeholders of secrets are those of one payload, and no other."""
        before: str = self.cleaned_data["before"]
        if not constant_time_compare(before, _seal(self.original)):
            raise ValidationError(_("The payload has changed in the meantime: edit it anew."))
        return before


def _seal(payload: Any) -> str:
    return salted_hmac("django_eventbus.edit", encode(payload), algorithm="sha256").hexdigest()


@admin.action(permissions=["edit"], description=gettext_lazy("Edit payload and retry"))
def edit(model_admin: Any, request: HttpRequest, rows: QuerySet[Any]) -> Any:
    """Payloads differ, so one is edited at a time."""
    chosen = list(rows.values_list("pk", flat=True)[:2])
    if len(chosen) == 1:
        return HttpResponseRedirect(model_admin.url_of("edit", chosen[0]))
    one = _("Choose one dead letter to edit its payload.")
    model_admin.message_user(request, one, messages.WARNING)
    return None


class DeadEventAdminMixin(StoryMixin, BulkMixin):
    acts = ACTS
    actions = (edit,)
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
    choice_filters = (DeadStatusFilter, QueueFilter, HandlerFilter, GroupFilter)

    def get_range_filters(self) -> list[Any]:
        return [
            ("finished_at", time_range(gettext_lazy("time of death"))),
            ("attempts", number_range(gettext_lazy("attempts"))),
        ]

    @admin.display(description=gettext_lazy("handler"))
    def shown_handler(self, event: DeadEvent) -> str:
        return one_line(event.dead_handler)

    @admin.display(description=gettext_lazy("error"))
    def shown_error(self, event: DeadEvent) -> str:
        """A line may end after a dot, and else had to be as long as the whole name."""
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
        # One more than is shown tells whether there is another page.
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
        errors = [each for each in letter.errors or [] if each["handler"] == letter.dead_handler]
        query = f"?{urlencode({'group': group.fingerprint})}"
        return {
            "handler": one_line(letter.dead_handler),
            "error": one_line(letter.error_type),
            "message": one_line(errors[-1]["message"]) if errors else "",
            "count": paging.Capped(group.count),
            "first_at": group.first_at,
            "last_at": group.last_at,
            "list_url": self.url_of("changelist") + query,
            "acts": [
                {
                    "label": act.label,
                    "url": self.url_of("bulk", act.name) + query,
                    "is_final": act.is_final,
                }
                for act in self.offered(request)
            ],
        }

    def retry_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """For all its handlers that died, or for the one that is named."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        letter = self._letter(request, pk, self.has_retry_permission)
        handler = request.POST.get("handler") or None
        if handler is not None and handler not in _given_up(letter):
            raise Http404
        with transaction.atomic(using=store_for().using):
            retried = dead_letters.retry(letter, only=handler) == 1
            if retried:
                for_whom = _("retried for %(handler)s") % {"handler": handler}
                self._write_history(request, letter, for_whom if handler else _("retried"))
        return self._tell(request, letter, retried)

    def edit_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        letter = self._letter(request, pk, self.has_edit_permission)
        form = PayloadForm(letter.payload, request.POST if request.method == "POST" else None)
        if form.is_valid():
            try:
                with transaction.atomic(using=store_for().using):
                    by = request.user.get_username()
                    edited = dead_letters.edit(letter, form.cleaned_data["payload"], by=by)
                    if edited:
                        self._write_history(request, letter, _("payload edited, and retried"))
            except EventBusError as error:
                form.add_error("payload", one_line(str(error)))
            else:
                return self._tell(request, letter, edited)
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

    def _write_history(self, request: HttpRequest, letter: DeadEvent, what: str) -> None:
        subject = f"{letter.type} {letter.event_id}"
        audit.record(request, DeadEvent, what, subject=subject, object_id=letter.pk)

    def _tell(self, request: HttpRequest, letter: DeadEvent, retried: bool) -> HttpResponse:
        if retried:
            self.message_user(request, _("The event is back in the queue."), messages.SUCCESS)
        else:
            gone = _("Nothing was done: the event is not dead any more, or somebody is at it.")
            self.message_user(request, gone, messages.WARNING)
        return HttpResponseRedirect(self.url_of("change", letter.pk))


def _given_up(letter: DeadEvent) -> list[str]:
    return [name for name, each in (letter.deliveries or {}).items() if each["state"] != "done"]


def _page_number(request: HttpRequest) -> int:
    asked = request.GET.get("p", "")
    return max(1, int(asked)) if asked.isdecimal() and len(asked) < 6 else 1


@admin.register(DeadEvent)
class DeadEventAdmin(DeadEventAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    pass
