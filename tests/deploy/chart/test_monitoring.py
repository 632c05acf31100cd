"""What the chart makes for monitoring and autoscaling: queries, alerts and scrapes fit the metrics that there are."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.monitoring import promql

Render = Callable[..., Any]


def test_engines_scale_on_metrics_that_are_there(render: Render, chart: Path, page: str, prefix: str) -> None:
    by_monitor = {"namespace": {"llm"}, "service": {"test-chairlift-frontend"}}  # labels that a ServiceMonitor adds
    known = {
        name: promql.Series(series.kind, {**series.labels, **by_monitor})
        for name, series in promql.exported(page).items()
    }
    keda = render(chart / "ci" / "keda-monitoring-values.yaml", frontend__flags={"metrics-prefix": prefix})
    (scaled,) = keda.of("ScaledObject")
    assert "replicas" not in keda.of("StatefulSet")[0]["spec"]
    queries = [trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]]
    assert [promql.complaints(query, known) for query in queries] == [[], []]
    hpa = render(chart / "ci" / "gateway-hpa-values.yaml", frontend__flags={"metrics-prefix": prefix})
    (scaler,) = hpa.of("HorizontalPodAutoscaler")
    asked = [metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    (rules,) = [one for one in hpa.of("ConfigMap") if one["metadata"]["name"].endswith("prometheus-adapter")]
    external = yaml.safe_load(rules["data"]["rules.yaml"])["externalRules"]
    assert [rule["name"]["as"] for rule in external] == asked
    matchers = 'namespace="llm",service="test-chairlift-frontend"'
    for rule in external:
        query = rule["metricsQuery"].replace("<<.LabelMatchers>>", matchers)
        assert query in queries  # KEDA's
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert series in known


def test_monitoring_is_that_of_compose_with_the_metrics_prefix(render: Render, chart: Path, root: Path) -> None:
    made = render(chart / "ci" / "keda-monitoring-values.yaml")
    (rules,) = made.of("PrometheusRule")
    original = (root / "deploy" / "monitoring" / "prometheus" / "alerts.yml").read_text()
    given, wanted = rules["spec"]["groups"], yaml.safe_load(original.replace("chairlift:", "vllm:"))["groups"]
    assert [rule["expr"] for group in given for rule in group["rules"]] == [
        rule["expr"] for group in wanted for rule in group["rules"]
    ]
    assert "docker" not in str(given)  # runbooks name Kubernetes' commands
    (dashboard,) = [one for one in made.of("ConfigMap") if one["metadata"]["name"].endswith("dashboard")]
    assert "vllm:engine_up" in dashboard["data"]["chairlift.json"]
    assert "chairlift:" not in dashboard["data"]["chairlift.json"]
    (monitor,) = made.of("ServiceMonitor")
    (service,) = [one for one in made.of("Service") if one["spec"].get("clusterIP") != "None"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "chairlift"  # the alerts' job
    # Of its own: Prometheus sends the whole value of a Secret, and that of frontends is a file of keys.
    credentials = monitor["spec"]["endpoints"][0]["authorization"]["credentials"]
    assert credentials == {"name": "prometheus-key", "key": "api-key"}


def test_alerts_look_for_the_job_that_is_scraped(render: Render, chart: Path) -> None:
    made = render(chart / "ci" / "keda-monitoring-values.yaml", nameOverride="llm-serving")
    (monitor,), (rules,) = made.of("ServiceMonitor"), made.of("PrometheusRule")
    (service,) = [one for one in made.of("Service") if one["spec"].get("clusterIP") != "None"]
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    rendered = yaml.safe_dump(rules["spec"])
    assert set(re.findall(r'job="([^"]*)"', rendered)) == {job}
    assert set(re.findall(r"app.kubernetes.io/name=(\S+)`", rendered)) == {job}
