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
    # In the processes that tests start, by the hundred, nobody looks at a page.
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

# Tests log users in; a slow password hash would only cost time.
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# Worker processes that tests start are told their settings, and what to import, this way.
if module := os.environ.get("EVENTBUS_TEST_IMPORT"):
    importlib.import_module(module)
EVENTBUS = json.loads(os.environ.get("EVENTBUS_TEST_SETTINGS", "{}"))
