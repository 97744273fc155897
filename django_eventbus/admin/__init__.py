"""The Django admin for operators: pages that show events and call the public API.

Each page is a mixin. A ModelAdmin that inherits from the mixin is registered for the model. A
project with an admin theme unregisters the model, and registers a class that inherits from the
mixin and from the theme's ModelAdmin.
"""

from django_eventbus.admin import (
    dead_letters,
    events,
    flow_control,
    lanes,
    overview,
    replays,
    schedules,
    workers,
)

__all__ = [
    "dead_letters",
    "events",
    "flow_control",
    "lanes",
    "overview",
    "replays",
    "schedules",
    "workers",
]
