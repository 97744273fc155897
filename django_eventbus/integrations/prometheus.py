"""Export the metrics of the bus to Prometheus.

The counters are in the database, so any process can be scraped, and no process needs the
multiprocess mode of ``prometheus_client``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import accumulate

from django.contrib.auth.decorators import login_not_required
from django.db import Error, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from django_eventbus.conf import settings
from django_eventbus.errors import failures
from django_eventbus.integrations.metrics import COUNTER, METRICS, Durations, Metric, Values, read
from django_eventbus.logs import about
from django_eventbus.schema.histograms import BOUNDS
from django_eventbus.store import is_outage, store_for

logger = logging.getLogger(__name__)

_BOUNDS = [*map(floatToGoString, BOUNDS.values()), "+Inf"]


class EventBusCollector(Collector):
    """Reads the metrics from the database when Prometheus scrapes them.

    If the database is unavailable, the only metric is ``eventbus_up`` with the value 0.
    """

    def __init__(self, using: str | None = None) -> None:
        self.using = using

    def describe(self) -> Iterable[Family]:
        """Return the metrics without values, so that registration needs no database."""
        return [_family(each, {}) for each in METRICS]

    def collect(self) -> Iterator[Family]:
        values = self._read()
        for each in METRICS:
            if each.name in values:
                yield _family(each, values[each.name])

    def _read(self) -> dict[str, Values]:
        store = store_for(self.using)
        try:
            return read(store)
        except Error as error:
            logger.warning(
                "metrics could not be read: %s", failures.in_a_line(error), extra=about()
            )
            if is_outage(error) and not store.connection.in_atomic_block:
                # The session may be broken. The next scrape opens a new connection.
                store.connection.close()
            return {"eventbus_up": {(): 0}}


def _family(metric: Metric, values: Values) -> Family:
    family = Family(metric.name, metric.help, metric.kind)
    for labels, value in values.items():
        named = dict(zip(metric.labels, labels, strict=True))
        if isinstance(value, Durations):
            _add_histogram(family, named, value)
        else:
            suffix = "_total" if metric.kind == COUNTER else ""
            family.add_sample(metric.name + suffix, named, value)
    return family


def _add_histogram(family: Family, labels: dict[str, str], durations: Durations) -> None:
    for bound, count in zip(_BOUNDS, accumulate(durations.counts), strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
    family.add_sample(f"{family.name}_count", labels, sum(durations.counts))
    family.add_sample(f"{family.name}_sum", labels, durations.seconds)


def render(using: str | None = None, *, accept: str = "") -> tuple[bytes, str]:
    """Return the metrics as text, and the content type of the text.

    ``accept`` is the Accept header of the request. The text has the format of OpenMetrics if the
    header allows it, otherwise the format of Prometheus. The caller closes the connection.
    """
    registry = CollectorRegistry()
    registry.register(EventBusCollector(using))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


@never_cache
@login_not_required
@require_safe
@transaction.non_atomic_requests
def metrics(request: HttpRequest) -> HttpResponse:
    """Answer a scrape of Prometheus.

    The request needs the header ``Authorization: Bearer …`` with EVENTBUS["METRICS_TOKEN"], or a
    user with the permission to view the overview.
    """
    if not (_has_token(request) or _may_view(request)):
        response = HttpResponse("A token or a permission is missing.\n", status=401)
        response["WWW-Authenticate"] = "Bearer"
        return response
    content, content_type = render(accept=request.headers.get("Accept", ""))
    return HttpResponse(content, content_type=content_type)


def _has_token(request: HttpRequest) -> bool:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    expected = settings.METRICS_TOKEN
    is_bearer = scheme.lower() == "bearer"
    return bool(expected) and is_bearer and constant_time_compare(token.strip(), expected)


def _may_view(request: HttpRequest) -> bool:
    user = getattr(request, "user", None)  # It is missing without AuthenticationMiddleware.
    return user is not None and user.has_perm("django_eventbus.view_minutestatistics")
