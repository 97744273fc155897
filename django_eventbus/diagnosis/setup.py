"""The check of the code and the settings of this process: EB026."""

from __future__ import annotations

from collections.abc import Iterator

from django.core import checks

from django_eventbus.diagnosis.examination import Bus, Result, check, fail, ok, warn

#: The tag of the system checks of the bus.
TAG = "eventbus"
#: System checks whose subject has a check of its own here: EB032, EB033.
COVERED = {"django_eventbus.W001", "django_eventbus.W007"}


@check(
    "EB026",
    title="System checks report faults",
    symptom="manage.py check prints errors or warnings of the event bus.",
    cause="A setting of EVENTBUS or DATABASES is wrong, or the code declares a handler, an event "
    "class or a schedule incorrectly.",
    fix='Follow the hint of each message. The page "System checks" of the reference explains each '
    "id.",
)
def system_checks(bus: Bus) -> Iterator[Result]:
    messages = [
        each
        for each in checks.run_checks(tags=[TAG])
        if not each.is_silenced() and each.id not in COVERED
    ]
    if not messages:
        yield ok("manage.py check --tag eventbus reports nothing")
    for each in messages:
        text = f"{each.id}: {each.msg}"
        hint = str(each.hint or "Run: manage.py check --tag eventbus")
        yield fail(text, fix=hint) if each.is_serious() else warn(text, fix=hint)
