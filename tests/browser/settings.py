"""Settings of the browser tests: static files are served, under a policy that forbids anything
inline but what carries the request's nonce."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS, MIDDLEWARE, ROOT_URLCONF

# Playwright keeps an event loop running in the thread of the tests, which then look asynchronous
# to Django.
os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "1"

# The apps of other tests register handlers, which would appear on the pages.
INSTALLED_APPS = [
    *(app for app in INSTALLED_APPS if not app.startswith("tests.")),
    "django.contrib.staticfiles",
    "tests.browser",
]
TIME_ZONE = "UTC"
ROOT_URLCONF = ROOT_URLCONF and "tests.browser.urls"  # A worker process serves no pages.

try:
    from django.utils.csp import CSP
except ImportError:  # before Django 6.0
    MIDDLEWARE = ["tests.browser.csp.StrictPolicy", *MIDDLEWARE]
else:
    MIDDLEWARE = ["django.middleware.csp.ContentSecurityPolicyMiddleware", *MIDDLEWARE]
    SECURE_CSP = {
        "default-src": [CSP.SELF],
        "script-src": [CSP.SELF, CSP.NONCE],
        "style-src": [CSP.SELF, CSP.NONCE],
    }

EVENTBUS = {"QUEUES": ["default", "mail"]}
