"""What the chart's files say, read without helm: names that are gone elsewhere turn these red."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy import chart_flags
from engine.config import EngineConfig
from frontend.config import FrontendConfig
from tests.deploy.monitoring import promql

PROGRAMS = {"_engine-pod.tpl": EngineConfig, "frontend-deployment.yaml": FrontendConfig}


@pytest.fixture
def schema(chart: Path) -> Any:
    return json.loads((chart / "values.schema.json").read_text())


@pytest.fixture
def values(chart: Path) -> Any:
    return yaml.safe_load((chart / "values.yaml").read_text())


@pytest.fixture
def templates(chart: Path) -> dict[str, str]:
    """The templates' texts by name."""
    return {path.name: path.read_text() for path in chart.rglob("templates/**/*.*")}


def shape(schema: Any, node: Any) -> Any:
    """The names of a schema's values, as nested as they are; values without names of their own are None."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    if node.get("additionalProperties") is not False:
        return None
    return {name: shape(schema, child) for name, child in node["properties"].items()}


def same(named: Any, values: Any, place: str = "values") -> list[str]:
    """Where names of the schema and of the values differ."""
    if named is None or not isinstance(values, dict):
        return []
    missing = [f"{place}: {name}" for name in named.keys() ^ values.keys()]
    return missing + [text for name in named.keys() & values.keys() for text in same(named[name], values[name], name)]


def test_schema_has_the_flags_that_the_programs_have(schema: Any) -> None:
    stale = [name for name, definition in chart_flags.definitions().items() if schema["$defs"][name] != definition]
    assert stale == [], "run: python deploy/chart_flags.py"


def test_every_value_has_a_default_and_a_schema(schema: Any, values: Any) -> None:
    named = shape(schema, schema)
    del named["global"]  # Helm's own
    for half in ("engine", "frontend"):
        assert values[half]["flags"] == {}  # the programs' own defaults
        named[half]["flags"] = None
        del named[half]["resources"]  # Kubernetes' own
    assert sorted(same(named, values)) == ["engine: resources", "frontend: resources"]


def test_schema_is_strict_at_every_level(schema: Any) -> None:
    open_ones = [
        path for path, node in objects(schema) if node.get("additionalProperties") is None and "properties" in node
    ]
    assert open_ones == []


def objects(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """All objects in a schema, with their places."""
    if isinstance(node, list):
        return [found for child in node for found in objects(child, path)]
    if not isinstance(node, dict):
        return []
    here = [(path, node)] if node.get("type") == "object" else []
    return here + [found for name, child in node.items() for found in objects(child, f"{path}/{name}")]


def test_value_sets_are_seven_and_each_is_valid(chart: Path, schema: Any, values: Any) -> None:
    files = list((chart / "ci").glob("*.yaml"))
    assert len(files) == 7
    for file in files:
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)
    jsonschema.validate(values, schema)


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": {}},
        {"engine": {"replica": 2}},
        {"engine": {"flags": {"max-num-seq": 8}}},
        {"engine": {"flags": {"enable-prefix-caching": "yes"}}},
        {"engine": {"flags": {"insecure-bind": True}}},  # the chart's own
        {"engine": {"device": "gpu"}},
        {"engine": {"image": {"digest": "sha256:12"}}},
        {"engine": {"autoscaling": {"kvCacheUsage": 80}}},
        {"frontend": {"service": {"grpcPort": 0}}},
        {"model": {"source": "s3"}},
    ],
    ids=str,
)
def test_mistake_is_refused_by_the_schema(schema: Any, wrong: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


@pytest.mark.parametrize("name", PROGRAMS)
def test_templates_use_flags_that_exist(templates: dict[str, str], name: str) -> None:
    used = set(re.findall(r"[- \"(]--([a-z][a-z-]+)", templates[name].split("$check := dict")[0]))
    fields = {field.removesuffix("_s").replace("_", "-") for field in PROGRAMS[name].__dataclass_fields__}
    assert used
    assert used <= fields


def test_ports_are_the_programs_defaults(templates: dict[str, str]) -> None:
    frontend, engine = FrontendConfig(), EngineConfig()
    assert (frontend.port, frontend.http_port, engine.port) == (50051, 8000, 50052)
    numbers = {int(number) for text in templates.values() for number in re.findall(r"\b[1-9]\d{3,4}\b", text)}
    assert numbers - {10001, 29500} == {50051, 8000, 50052}  # the user; where nodes of an engine meet


def test_metrics_that_the_chart_names_are_exported(templates: dict[str, str], page: str, prefix: str) -> None:
    known = promql.exported(page)
    named = {
        f"{prefix}:{name}"
        for text in templates.values()
        for name in re.findall(r"\{\{ ?(?:\.prefix|\$prefix) ?\}\}:(\w+)", text)
    }
    assert len(named) == 6
    assert named <= known.keys()


def test_alerts_and_dashboard_are_those_of_monitoring(root: Path, chart: Path) -> None:
    monitoring = root / "deploy" / "monitoring"
    assert (chart / "files" / "alerts.yml").resolve() == monitoring / "prometheus" / "alerts.yml"
    assert (chart / "files" / "dashboard.json").resolve() == monitoring / "grafana" / "dashboards" / "chairlift.json"


def test_version_is_the_projects(root: Path, chart: Path) -> None:
    (version,) = re.findall(r'^version = "(.*)"', (root / "pyproject.toml").read_text(), re.MULTILINE)
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert (about["version"], about["appVersion"]) == (version, version)


def test_user_and_cache_folder_are_the_images(root: Path, templates: dict[str, str]) -> None:
    dockerfile = (root / "deploy" / "Dockerfile").read_text()
    assert "USER 10001:10001" in dockerfile
    assert templates["_helpers.tpl"].count(": 10001") == 3
    folders = re.findall(r"(?:HF_HOME|NUMBA_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", dockerfile)
    assert len(folders) == 3
    assert all(folder.startswith("/var/cache/chairlift/") for folder in folders)
    assert "mountPath: /var/cache/chairlift}" in templates["_engine-pod.tpl"]
