"""The smallest project that can publish and handle."""

from benchmarks.databases import chosen_database

SECRET_KEY = "only for benchmarks"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
DATABASES = {"default": chosen_database()}
INSTALLED_APPS = ["rangefilter", "django_eventbus", "benchmarks"]
