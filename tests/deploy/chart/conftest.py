"""The chart of deploy/helm, and what helm makes of it. Without helm only what its files say is tested."""

import functools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import chart_tools

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "chairlift"
VALUE_SETS = sorted(path.name for path in (CHART / "ci").glob("*.yaml"))
Manifest = dict[str, Any]


def _helm(*arguments: str) -> "subprocess.CompletedProcess[str]":
    helm = chart_tools.find_helm()
    if helm is None:
        pytest.skip("needs helm: `make chart-tools` fetches it")
    return subprocess.run([str(helm), *arguments], capture_output=True, text=True, check=False, timeout=120)


@functools.cache
def _rendered(*arguments: str) -> tuple[int, str, str]:
    done = _helm("template", "test", str(CHART), "--namespace", "llm", *arguments)
    return done.returncode, done.stdout, done.stderr


class Chart:
    """What one set of values makes.

    Args:
        manifests: all objects.
    """

    def __init__(self, manifests: list[Manifest]) -> None:
        self.manifests = manifests

    def of(self, kind: str) -> list[Manifest]:
        """All objects of a kind."""
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def owner(self, component: str) -> Manifest:
        """What has the pods of one half."""
        kinds = ("StatefulSet", "LeaderWorkerSet") if component == "engine" else ("Deployment",)
        (owner,) = [one for kind in kinds for one in self.of(kind)]
        return owner

    def template(self, component: str) -> Manifest:
        """Their template; of engines that span several pods that of the leaders. "worker": that of their other pods."""
        if component == "worker":
            template: Manifest = self.owner("engine")["spec"]["leaderWorkerTemplate"]["workerTemplate"]
            return template
        spec = self.owner(component)["spec"]
        return dict(spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"])

    def pod(self, component: str) -> Manifest:
        """The spec of a template."""
        spec: Manifest = self.template(component)["spec"]
        return spec

    def container(self, component: str) -> Manifest:
        """Its only container."""
        (container,) = self.pod(component)["containers"]
        return dict(container)

    @property
    def has_groups(self) -> bool:
        """Whether an engine spans several pods."""
        return bool(self.of("LeaderWorkerSet"))


@pytest.fixture
def chart() -> Path:
    """deploy/helm/chairlift."""
    return CHART


@pytest.fixture(params=VALUE_SETS)
def value_set(request: pytest.FixtureRequest) -> Path:
    """Each file of the chart's ci folder."""
    return CHART / "ci" / str(request.param)


@pytest.fixture
def helm() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """helm(argument, ...) runs helm; skips where there is none."""
    return _helm


@pytest.fixture
def render() -> Callable[..., Chart]:
    """render(file=None, **values): the chart with a file of values and with others by path, as engine__replicas=2."""

    def make(file: Path | None = None, **values: Any) -> Chart:
        code, out, errors = _rendered(*_arguments(file, values))
        assert code == 0, errors
        return Chart([manifest for manifest in yaml.safe_load_all(out) if manifest])

    return make


@pytest.fixture
def refusal() -> Callable[..., str]:
    """refusal(**values): what helm says of values that it does not accept."""

    def make(**values: Any) -> str:
        code, _, errors = _rendered(*_arguments(None, values))
        assert code != 0
        return "\n".join(line for line in errors.splitlines() if "symbolic link" not in line)

    return make


def _arguments(file: Path | None, values: dict[str, Any]) -> list[str]:
    named = [f"--set-json={path.replace('__', '.')}={json.dumps(value)}" for path, value in values.items()]
    return ([f"--values={file}"] if file else []) + named
