"""The Django admin as the operator's workbench: shows what there is, calls the verbs.

Each page is a mixin and its registration, so that a project with a theme of its own can unregister
a model and register it again with the mixin and the theme's ModelAdmin.
"""

from django_eventbus.admin import dead, events, flow, overview, schedules

__all__ = ["dead", "events", "flow", "overview", "schedules"]
