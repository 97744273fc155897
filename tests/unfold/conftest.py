"""Run by ``make test-browser``, with settings of their own."""

from django.conf import settings

SETTINGS = "tests.unfold.settings"
collect_ignore_glob = [] if settings.SETTINGS_MODULE == SETTINGS else ["*.py"]
