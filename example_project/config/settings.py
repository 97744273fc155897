"""Settings of the example shop: an ordinary Django project with an ``EVENTBUS`` dict."""

import os
from pathlib import Path
from typing import Any

import django

BASE_DIR = Path(__file__).resolve().parent.parent

SECRET_KEY = "an example has no secrets"
DEBUG = True
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
ROOT_URLCONF = "config.urls"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

CONSOLE = "django.core.mail.backends.console.EmailBackend"
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": CONSOLE}}
else:
    EMAIL_BACKEND = CONSOLE
DEFAULT_FROM_EMAIL = "The Corner Shop <orders@shop.example>"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "rangefilter",
    "django_eventbus",
    "shop",
    "outside",
]


def sqlite(path: str) -> dict[str, Any]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path,
        "OPTIONS": {
            # With WAL, readers never wait for the writer. With IMMEDIATE, a transaction takes the
            # write lock when it begins, so that a second writer waits instead of failing.
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL;",
        },
    }


def postgresql(url: str) -> dict[str, Any]:
    from psycopg.conninfo import conninfo_to_dict

    parameters = conninfo_to_dict(url)
    name = parameters.pop("dbname")
    return {"ENGINE": "django.db.backends.postgresql", "NAME": name, "OPTIONS": parameters}


# The path of a SQLite file, or postgresql://user:password@host/name
SHOP_DATABASE = os.environ.get("SHOP_DATABASE", str(BASE_DIR / "shop.sqlite3"))
DATABASES = {
    "default": (
        postgresql(SHOP_DATABASE)
        if SHOP_DATABASE.startswith("postgresql://")
        else sqlite(SHOP_DATABASE)
    )
}

EVENTBUS = {
    # The demo kills its worker to show that no event is lost. Recovery must not take a minute.
    "ABANDON_AFTER": 5,
    "HANDOFF_DEADLINE": 10,
    "RETRY": {"max_retries": 8, "base_delay": 0.5, "max_delay": 5},
}

# The URL of Celery's broker, or the path of a folder that replaces a broker. If it is empty, the
# shop does not use Celery.
SHOP_BROKER = os.environ.get("SHOP_BROKER", "")
# The processes that run the handler ``ship``.
SHIPPING_EXECUTOR = "celery" if SHOP_BROKER else "worker"

CELERY_TASK_DEFAULT_QUEUE = os.environ.get("SHOP_BROKER_QUEUE", "corner-shop")
CELERY_TASK_DEFAULT_EXCHANGE = "celery"
CELERY_WORKER_ENABLE_REMOTE_CONTROL = False
if SHOP_BROKER.startswith("/"):
    CELERY_BROKER_URL = "filesystem://"
    CELERY_BROKER_TRANSPORT_OPTIONS = {
        "data_folder_in": SHOP_BROKER,
        "data_folder_out": SHOP_BROKER,
        "control_folder": SHOP_BROKER,
    }
else:
    CELERY_BROKER_URL = SHOP_BROKER

# The URL of a partner's webhook, and the secret that signs the calls. In the demo this server is
# also the partner.
PARTNER_URL = os.environ.get("SHOP_PARTNER_URL", "http://127.0.0.1:8000/partner/")
PARTNER_SECRET = "shared with the partner"

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "config.middleware.strict_content_security_policy",
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
