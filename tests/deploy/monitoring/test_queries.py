"""Every query of alerts and dashboard, parsed, against what a frontend really exports."""

import json
import re
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from tests.deploy.monitoring import promql

# What Grafana puts in place of these, when everything is chosen.
VARIABLES = {"$__rate_interval": "1m", "$model": ".*", "$engine": ".*", "$frontend": "10.0.0.1:8000"}
FILES = ("prometheus/alerts.yml", "grafana/dashboards/chairlift.json")


def queries_of(path: Path, text: str) -> dict[str, str]:
    """Queries of a file by where they are, Grafana's variables filled in."""
    if path.suffix == ".yml":
        return {rule["alert"]: rule["expr"] for group in yaml.safe_load(text)["groups"] for rule in group["rules"]}
    dashboard = json.loads(text)
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    }
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            asked = re.fullmatch(r"label_values\((\S+), (\w+)\)", variable["query"]["query"])
            assert asked is not None, variable["name"]
            name, label = asked.groups()
            found[f"variable {variable['name']}"] = f"max by ({label}) ({name})"
    for variable, value in VARIABLES.items():
        found = {place: query.replace(variable, value) for place, query in found.items()}
    return found


@pytest.fixture
def queries(monitoring: Path, prefix: str) -> dict[str, str]:
    """All queries, for a prefix as docs/monitoring.md says: one word replaced in both files."""
    found: dict[str, str] = {}
    for name in FILES:
        found |= queries_of(monitoring / name, (monitoring / name).read_text().replace("chairlift:", f"{prefix}:"))
    return found


def test_every_query_asks_for_what_is_there_in_the_way_its_kind_allows(queries: dict[str, str], page: str) -> None:
    known = promql.exported(page) | promql.PROMETHEUS_OWN
    wrong = {
        place: found
        for place, query in queries.items()
        if not place.startswith("variable ") and (found := promql.complaints(query, known))
    }
    assert wrong == {}
    for place, query in queries.items():
        if place.startswith("variable "):
            (selector,) = promql.selectors(promql_parser.parse(query))
            assert set(promql_parser.parse(query).modifier.labels) <= {*known[selector.name].labels, "instance"}, place


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("sum(rate(chairlift:time_to_first_tokens_bucket[5m]))", "not exported"),
        ("chairlift:request_success_total", "is a counter"),
        ("rate(chairlift:num_requests_running[5m])", "is a gauge"),
        ("deriv(chairlift:prompt_tokens_total[5m])", "which is no gauge"),
        ("histogram_quantile(0.9, sum by (le) (rate(chairlift:prompt_tokens_total[5m])))", "le"),
        ("histogram_quantile(0.9, sum(rate(chairlift:time_to_first_token_seconds_bucket[5m])))", "without le"),
        ("sum(rate(chairlift:time_to_first_token_seconds_bucket[5m]))", "belong together"),
        ('chairlift:num_requests_running{reason="x"}', "has no label reason"),
        ('rate(chairlift:request_success_total{finished_reason=~"stop|abort"}[5m])', "never has"),
        ("sum by (reason) (chairlift:num_requests_running)", "aggregates by"),
    ],
)
@pytest.mark.parametrize("prefix", ["chairlift"], indirect=True)
def test_wrong_queries_are_found(query: str, complaint: str, page: str) -> None:
    assert any(complaint in found for found in promql.complaints(query, promql.exported(page)))


def template_labels(text: str) -> set[str]:
    return set(re.findall(r"\$labels\.(\w+)", text))


@pytest.mark.parametrize("prefix", ["chairlift"], indirect=True)
def test_alerts_speak_of_labels_they_have(monitoring: Path, page: str) -> None:
    known = promql.exported(page) | promql.PROMETHEUS_OWN
    (group,) = yaml.safe_load((monitoring / FILES[0]).read_text())["groups"]
    for rule in group["rules"]:
        spoken = template_labels(" ".join(rule["annotations"].values()))
        assert spoken <= promql.result_labels(promql_parser.parse(rule["expr"]), known), rule["alert"]


@pytest.mark.parametrize("prefix", ["chairlift"], indirect=True)
def test_legends_speak_of_labels_their_queries_have(monitoring: Path, page: str) -> None:
    known = promql.exported(page) | promql.PROMETHEUS_OWN
    path = monitoring / FILES[1]
    queries = queries_of(path, path.read_text())
    for panel in json.loads(path.read_text())["panels"]:
        for target in panel.get("targets", ()):
            place = f"{panel['title']} {target['refId']}"
            spoken = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"worker"}  # with several workers
            assert spoken <= promql.result_labels(promql_parser.parse(queries[place]), known), place


def test_every_alert_says_what_to_do_and_is_explained(monitoring: Path, root: Path) -> None:
    (group,) = yaml.safe_load((monitoring / FILES[0]).read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert set(rule["annotations"]) == {"summary", "runbook"}, rule["alert"]
        assert rule["labels"] in ({"severity": "page"}, {"severity": "ticket"}), rule["alert"]
    told = re.findall(r"^\| `(Chairlift\w+)` \| (\w+) \|", (root / "docs" / "monitoring.md").read_text(), re.MULTILINE)
    assert told == [(rule["alert"], rule["labels"]["severity"]) for rule in rules]
