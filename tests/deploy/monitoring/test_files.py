"""Prometheus' configuration, Grafana's provisioning and the dashboard, as far as they can be judged without either.

Where promtool is at hand (Debian's package prometheus has it), Prometheus' own checker judges too.
"""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {"none", "short", "s", "reqps", "percentunit", "bytes", "suffix:tok/s"}


@pytest.fixture
def dashboard(monitoring: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((monitoring / "grafana" / "dashboards" / "chairlift.json").read_text())
    return loaded


@pytest.fixture
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Without the headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_dashboard_can_be_provisioned(dashboard: dict[str, Any]) -> None:
    assert dashboard["id"] is None  # Grafana gives one
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", dashboard["uid"])
    assert dashboard["title"]
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "frontend", "model", "engine"]
    assert variables["datasource"]["type"] == "datasource"
    for name in ("frontend", "model", "engine"):
        assert variables[name]["datasource"] == DATASOURCE
        assert variables[name]["multi"] is True  # so queries match with =~
        assert variables[name]["includeAll"] is True


def test_panels_have_numbers_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for place in places:
        assert min(place.values()) >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in itertools.combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_every_panel_asks_the_chosen_prometheus_and_says_what_it_shows(panels: list[dict[str, Any]]) -> None:
    titles = [panel["title"] for panel in panels]
    assert len(set(titles)) == len(titles)
    for panel in panels:
        assert panel["datasource"] == DATASOURCE, panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["targets"], panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
        values = [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert values[0] is None
        assert values[1:] == sorted(values[1:])


def test_every_query_follows_the_variables(panels: list[dict[str, Any]]) -> None:
    known = {"__rate_interval", "model", "engine", "frontend"}
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            assert set(re.findall(r"\$(\w+)", query)) <= known
            for selector in re.findall(r"chairlift:\w+(\{[^}]*\}|)", query):
                assert 'instance=~"$frontend"' in selector, query


def test_prometheus_finds_every_frontend_and_brings_the_key(monitoring: Path, root: Path) -> None:
    config = yaml.safe_load((monitoring / "prometheus" / "prometheus.yml").read_text())
    compose = yaml.safe_load((root / "compose.yaml").read_text())["services"]
    (job,) = config["scrape_configs"]
    (dns,) = job["dns_sd_configs"]
    assert job["job_name"] == "chairlift"  # the alerts name it
    assert [name.removesuffix(".") for name in dns["names"]] == ["frontend"]
    assert compose["frontend"]["ports"][1].endswith(f":{dns['port']}")
    assert set(compose["prometheus"]["networks"]) <= set(compose["frontend"]["networks"])
    assert job["authorization"] == {"credentials_file": "/tmp/api-key"}
    assert ">/tmp/api-key" in compose["prometheus"]["entrypoint"][2]
    assert all((monitoring / "prometheus" / name).is_file() for name in config["rule_files"])


def test_grafana_finds_prometheus_and_the_dashboard(monitoring: Path, root: Path) -> None:
    (source,) = yaml.safe_load((monitoring / "grafana/datasources/chairlift.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((monitoring / "grafana/dashboards/chairlift.yml").read_text())["providers"]
    grafana = yaml.safe_load((root / "compose.yaml").read_text())["services"]["grafana"]
    config = yaml.safe_load((monitoring / "prometheus" / "prometheus.yml").read_text())
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    mounts = {mount["target"]: mount["source"] for mount in grafana["volumes"] if isinstance(mount, dict)}
    assert (root / mounts[provider["options"]["path"]]).resolve() == monitoring / "grafana" / "dashboards"
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/chairlift.json"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
@pytest.mark.parametrize("command", ["config --syntax-only prometheus.yml", "rules --lint=all --lint-fatal alerts.yml"])
def test_prometheus_own_checker_has_no_complaint(monitoring: Path, command: str) -> None:
    done = subprocess.run(
        ["promtool", "check", *command.split()],
        cwd=monitoring / "prometheus", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
