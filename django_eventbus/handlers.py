"""The bus's own handlers. The app configuration imports the module ``handlers`` of every app."""

from __future__ import annotations

from importlib.util import find_spec

from django_eventbus import replay

replay.register()

if find_spec("celery"):
    from django_eventbus.integrations import celery

    celery.register()
