"""Settings of the test project. EVENTBUS_TEST_DB chooses its database, see databases.py."""

import importlib
import json
import os

from tests.databases import chosen_database, inherited_name

SECRET_KEY = "only for tests"
DEBUG = bool(os.environ.get("EVENTBUS_TEST_DEBUG"))
USE_TZ = True
ROOT_URLCONF: str | None = "tests.urls"
STATIC_URL = "static/"

DATABASES = {"default": chosen_database()}

INSTALLED_APPS = [
    "django.contrib.contenttypes",
    "django.contrib.auth",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.admin",
    "rangefilter",
    "django_eventbus",
    "tests.shop",
    "tests.faults",
]

if inherited_name():
    # The many processes that tests start serve no pages.
    INSTALLED_APPS = [each for each in INSTALLED_APPS if not each.startswith("django.contrib.")]
    ROOT_URLCONF = None

MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

# Handlers of tests.shop run in Celery, but only the tests of Celery load a Celery app. Tests with
# ATOMIC="event" (E302) publish no events for these handlers.
SILENCED_SYSTEM_CHECKS = ["django_eventbus.W301", "django_eventbus.E302"]

# A slow password hash would only make logins of tests slow.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Worker processes that tests start get their settings and extra imports from the environment.
for module in filter(None, os.environ.get("EVENTBUS_TEST_IMPORT", "").split(",")):
    importlib.import_module(module)
EVENTBUS = json.loads(os.environ.get("EVENTBUS_TEST_SETTINGS", "{}"))
LOGGING = json.loads(os.environ.get("EVENTBUS_TEST_LOGGING", "{}"))
