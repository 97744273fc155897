"""The bus's own handlers. The app configuration imports the module ``handlers`` of every app."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("celery"):
    from django_eventbus.integrations import celery

    celery.register()
