"""A URLconf for the metrics: ``path("metrics/", include(…))``."""

from __future__ import annotations

from django.urls import path

from django_eventbus.integrations.prometheus import metrics

app_name = "eventbus_metrics"
urlpatterns = [path("", metrics, name="metrics")]
