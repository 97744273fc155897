"""Spans that OpenTelemetry's SDK exports in tests, and the relations between them.

A process that a test starts imports this module by EVENTBUS_TEST_IMPORT. It then appends its spans
to the file that EVENTBUS_TEST_SPANS names.
"""

import json
import os
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """The spans that were exported, with the tracer of the test itself."""

    def __init__(self, provider, exporter):
        self.provider = provider
        self.exporter = exporter
        self.tracer = provider.get_tracer("tests")

    def all(self):
        return [facts_of(each) for each in self.exporter.get_finished_spans()]

    def named(self, name):
        return [each for each in self.all() if each["name"] == name]

    def the(self, name):
        (only,) = self.named(name)
        return only

    def names(self):
        return sorted(each["name"] for each in self.all())


def facts_of(span):
    """Return a span as JSON values."""
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": f"{span.context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "links": [f"{each.context.span_id:016x}" for each in span.links],
        "attributes": dict(span.attributes),
        "events": [(each.name, dict(each.attributes)) for each in span.events],
        "status": span.status.status_code.name,
    }


def traces_of(spans):
    """Return sets of names: spans are in one set if parents and links connect them."""
    groups = []
    for span in spans:
        known = {span["id"], *span["links"], *filter(None, [span["parent"]])}
        apart = [each for each in groups if not each[0] & known]
        joined = [each for each in groups if each[0] & known]
        ids = known.union(*(each[0] for each in joined))
        names = [span["name"], *(name for each in joined for name in each[1])]
        groups = [*apart, (ids, names)]
    return [sorted(names) for _, names in groups]


def new_provider(processor, **options):
    provider = TracerProvider(**options)
    provider.add_span_processor(processor)
    return provider


@pytest.fixture
def exported():
    """Record all spans of the test, which are exported when they end."""
    from django_eventbus.integrations import opentelemetry
    from django_eventbus.tracing import spans

    exporter = InMemorySpanExporter()
    provider = new_provider(SimpleSpanProcessor(exporter))
    previous = opentelemetry.install(provider)
    yield Spans(provider, exporter)
    spans.install(previous)
    provider.shutdown()


class FileExporter(SpanExporter):
    """Appends spans to a file that several processes share, one JSON object per line."""

    def __init__(self, path):
        self.path = Path(path)

    def export(self, spans):
        lines = "".join(json.dumps(facts_of(each)) + "\n" for each in spans)
        with self.path.open("a") as file:
            file.write(lines)
        return SpanExportResult.SUCCESS


def in_file(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


if path := os.environ.get("EVENTBUS_TEST_SPANS"):  # a process that a test started
    exporter = FileExporter(path)
    # With EVENTBUS_TEST_SPANS_LATE, spans are exported only when the process flushes them.
    late = BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000)
    is_late = os.environ.get("EVENTBUS_TEST_SPANS_LATE")
    trace.set_tracer_provider(new_provider(late if is_late else SimpleSpanProcessor(exporter)))
