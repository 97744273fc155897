"""Settings of a project whose handlers run in tasks of a real backend. It has its own database."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "django_tasks_db"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["EVENTBUS_TEST_TASKS_DB"],
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend", "QUEUES": ["default", "mail"]}}
