"""The smallest project that can publish and handle events."""

import os

from benchmarks.databases import chosen_database

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": chosen_database()}
ROOT_URLCONF = "benchmarks.urls"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rangefilter",
    "django_eventbus",
    "benchmarks",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
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
            ]
        },
    }
]
STATIC_URL = "static/"
ALLOWED_HOSTS = ["testserver"]
# A log line per failure would be most of the output of a run.
LOGGING = {"version": 1, "loggers": {"django_eventbus": {"level": "CRITICAL"}}}

if os.environ.get("EVENTBUS_BENCH_BROKER"):
    import benchmarks.celery_app  # noqa: F401 - as a project's __init__ does
