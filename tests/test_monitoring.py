"""The dashboard, the alert rules and the page of metrics use only metrics that exist (M20)."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from django_eventbus.integrations.metrics import COUNTER, HISTOGRAM, METRICS

DOCS = Path(__file__).parent.parent / "docs"
ALERTS = DOCS / "monitoring" / "alerts.yml"
DASHBOARD = DOCS / "monitoring" / "dashboard.json"


def labels_of_samples():
    """The labels of each sample that a scrape may contain, by the name of the sample."""
    found = {}
    for each in METRICS:
        if each.kind == COUNTER:
            found[f"{each.name}_total"] = set(each.labels)
        elif each.kind == HISTOGRAM:
            found |= {f"{each.name}_{end}": set(each.labels) for end in ("count", "sum")}
            found[f"{each.name}_bucket"] = {*each.labels, "le"}
        else:
            found[each.name] = set(each.labels)
    return found


SAMPLES = labels_of_samples()


def alerts():
    """(name, expression, annotations) of each alert rule."""
    for rule in ALERTS.read_text().split("- alert: ")[1:]:
        name, rest = rule.split("\n", 1)
        expression = re.search(r"expr: (.+?)\n +(?:for|labels):", rest, re.DOTALL).group(1)
        yield name, expression, rest


def panels():
    """(title of the panel, expression, legend) of each query of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


EXPRESSIONS = [(name, expr) for name, expr, _ in (*alerts(), *panels())]


def grouped_by(expression):
    """The labels of each ``by (...)``."""
    return [set(re.split(r",\s*", each)) for each in re.findall(r"by \(([^)]+)\)", expression)]


def objections(expression):
    """What is wrong with the metrics and labels of an expression."""
    used = re.findall(r"(eventbus_\w+)(?:\{([^}]*)\})?", expression)
    if not used:
        yield "it names no metric"
    available = set()
    for name, selector in used:
        if name not in SAMPLES:
            yield f"there is no {name}"
            continue
        available |= SAMPLES[name]
        for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector):
            if label not in SAMPLES[name]:
                yield f"{name} has no label {label}"
    for labels in grouped_by(expression):
        if not labels <= available:
            yield f"by {labels - available}"


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS)
def test_every_expression_uses_metrics_and_labels_that_exist(where, expression):
    assert list(objections(expression)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        "up == 0",
        "eventbus_nothing > 0",
        "eventbus_events_completed > 0",
        'eventbus_dead_letters{state="x"} > 0',
        "max by (handler) (eventbus_dead_letters) > 0",
        "eventbus_event_duration_seconds > 0",
    ],
)
def test_wrong_expressions_are_found(wrong):
    assert list(objections(wrong))


def test_texts_of_alerts_and_legends_use_labels_of_their_expression():
    for name, expression, text in alerts():
        used = set(re.findall(r"\$labels\.(\w+)", text))
        assert used <= {"instance"}.union(*grouped_by(expression)), name
    for title, expression, legend in panels():
        used = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert used <= set().union(*grouped_by(expression)), title


def test_every_metric_is_on_the_dashboard():
    shown = " ".join(expression for _, expression, _ in panels())
    assert [each.name for each in METRICS if each.name not in shown] == []


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_alert_rules():
    checked = subprocess.run(
        ["promtool", "check", "rules", ALERTS], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
def test_promtool_accepts_the_queries_of_the_dashboard(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m")}
        for number, (_, expression, _) in enumerate(panels())
    ]
    path = tmp_path / "rules.yml"  # JSON is YAML.
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(
        ["promtool", "check", "rules", path], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_page_of_metrics_has_every_metric_with_its_labels_and_meaning():
    rows = re.findall(
        r"^\| `(eventbus_\w+)` \| (.+?) \| (.+) \|$",
        (DOCS / "reference" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    written = {
        name: (set(re.findall(r"`(\w+)`", labels)), meaning.replace("`", ""))
        for name, labels, meaning in rows
    }
    assert len(rows) == len(written) == len(METRICS)
    for each in METRICS:
        name = f"{each.name}_total" if each.kind == COUNTER else each.name
        labels, meaning = written[name]
        assert labels == set(each.labels)
        assert meaning.startswith(each.help)
