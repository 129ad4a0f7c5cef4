"""Dashboard, alert rules and autoscaler: queries that Prometheus parses, over metrics that the server has."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from support.deployment import DEPLOY, documents, of_kind
from support.fake_engine import FakeEngine

from pageturner.service.engine.api import Condition, EngineHealth
from pageturner.service.engine.metrics import Metrics
from pageturner.service.monitoring.exposition import PREFIX, families
from pageturner.service.monitoring.metrics_page import Sources

OF_PROMETHEUS = {"up"}
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
LABELS = {"le", "instance", "job", "namespace", "pod"}
"""That Prometheus gives, or a histogram."""

DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "pageturner.json").read_text(encoding="utf-8"))
((ALERTS,),) = ([document["groups"] for document in documents(DEPLOY / "prometheus" / "alerts.yaml")],)
RULES: list[Any] = [rule for group in ALERTS for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def panel_queries() -> Iterator[tuple[str, str]]:
    """With Grafana's variables filled in."""
    for panel in PANELS:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m").replace("$instance", ".*")
            yield f"panel {panel['title']}: {target['refId']}", query


def queries() -> list[tuple[str, str]]:
    return [*panel_queries(), *((f"alert {rule['alert']}", rule["expr"]) for rule in RULES)]


@pytest.fixture(scope="module")
def served() -> dict[str, set[str]]:
    """Every series that the server has, and its labels."""
    engine = FakeEngine()
    sources = Sources(
        Metrics(), lambda: Condition(EngineHealth.SERVING), lambda: engine, lambda: 0, lambda: 2e9
    )
    process = CollectorRegistry()
    ProcessCollector(registry=process)
    found: dict[str, set[str]] = {}
    for family in [*families(sources.observe()), *process.collect()]:
        labels = set(getattr(family, "_labelnames", ()))
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels
    return found


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each metric that a query names, and the labels by which it selects."""

    def walk(node: Any) -> Iterator[tuple[str, set[str]]]:
        selector = getattr(node, "vector_selector", None)
        if selector is not None:
            yield from walk(selector)
        elif hasattr(node, "matchers") and hasattr(node, "name"):
            yield node.name, {matcher.name for matcher in node.matchers.matchers}
        for name in ("lhs", "rhs", "expr", "param"):
            child = getattr(node, name, None)
            if child is not None and not isinstance(child, str):
                yield from walk(child)
        for child in getattr(node, "args", None) or ():
            yield from walk(child)

    yield from walk(promql_parser.parse(query))


@pytest.mark.parametrize(("origin", "query"), queries())
def test_a_query_parses_and_names_what_the_server_has(
    origin: str, query: str, served: dict[str, set[str]]
) -> None:
    named = list(selectors(query))
    assert named, "a query of nothing"
    for name, labels in named:
        assert name in served.keys() | OF_PROMETHEUS, f"{origin}: the server has no {name}"
        assert labels - LABELS <= served.get(name, set()), f"{origin}: {name} has no such label"
    groups = re.findall(r"(?:by|without) \(([^)]*)\)", query)
    grouped = {label for group in groups for label in group.split(", ")}
    known = LABELS.union(*(served.get(name, set()) for name, _ in named))
    assert grouped <= known, f"{origin}: no metric has these labels"


def test_a_name_that_is_wrong_is_found() -> None:
    query = 'sum(rate(pageturner:nothing_total{state="x"}[5m])) > 2 * histogram_quantile(0.5, a_bucket)'
    assert list(selectors(query)) == [("pageturner:nothing_total", {"state"}), ("a_bucket", set())]


def test_the_dashboard_is_whole() -> None:
    numbers = Counter(panel["id"] for panel in DASHBOARD["panels"])
    assert set(numbers.values()) == {1}, "panels of one number"
    assert len(PANELS) >= 20
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["legendFormat"] for target in panel["targets"])
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "instance"}


def test_an_alert_says_what_is_wrong_and_how_bad_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 10
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        told = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        assert told <= {"instance", "axis", "policy", "cause", "file"}


def test_the_autoscaler_scales_by_a_metric_that_the_server_has(served: dict[str, set[str]]) -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    (adapter,) = documents(DEPLOY / "kubernetes" / "prometheus-adapter.yaml")
    (rule,) = adapter["rules"]["custom"]
    assert rule["name"]["as"] == metric["pods"]["metric"]["name"]
    ((series, labels),) = selectors(rule["seriesQuery"])
    assert series in served
    assert series.startswith(PREFIX)
    assert labels == set(rule["resources"]["overrides"])
