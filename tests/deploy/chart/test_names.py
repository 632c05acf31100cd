"""Names of the chart's objects: short enough for Kubernetes, and those that people are told."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml


@pytest.mark.parametrize("release", ["r" * 53, "release-of-a-model-with-a-name"], ids=len)
def test_names_leave_room_for_the_labels_of_pods(helm: Any, chart: Path, release: str) -> None:
    """A pod's label controller-revision-hash is the name of its StatefulSet, a dash and a hash of 10 characters.

    Labels have 63 characters, and a pod whose label is longer is not created (kubernetes/kubernetes#64023). Workers of
    a LeaderWorkerSet are a StatefulSet named after their leader (kubernetes-sigs/lws#410); there may be 100 groups.
    """
    most = 63 - 11
    for values, kind, ordinal in (({}, "StatefulSet", ""), ({"engine.hosts": 2}, "LeaderWorkerSet", "-99")):
        flags = [f"--set={name}={value}" for name, value in values.items()]
        done = helm("template", release, str(chart), "--namespace", "llm", *flags)
        assert done.returncode == 0, done.stderr
        manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
        (owner,) = [one for one in manifests if one["kind"] == kind]
        assert len(owner["metadata"]["name"] + ordinal) <= most
        assert all(len(one["metadata"]["name"]) <= 63 for one in manifests if one["kind"] == "Service")


@pytest.mark.parametrize("values", [{}, {"nameOverride": "qwen2.5"}, {"fullnameOverride": "qwen2.5"}], ids=str)
def test_dots_of_a_models_name_are_not_in_names_of_services(helm: Any, chart: Path, values: dict[str, str]) -> None:
    """They are labels of RFC 1035; names of Helm's releases may have dots."""
    flags = [f"--set={name}={value}" for name, value in values.items()]
    done = helm("template", "llama-3.1", str(chart), "--namespace", "llm", *flags)
    assert done.returncode == 0, done.stderr
    manifests = [one for one in yaml.safe_load_all(done.stdout) if one]
    services = {one["metadata"]["name"] for one in manifests if one["kind"] == "Service"}
    assert len(services) == 2
    assert all(re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name) for name in services)
    (owner,) = [one for one in manifests if one["kind"] == "StatefulSet"]
    assert owner["spec"]["serviceName"] in services


@pytest.mark.parametrize("num_hosts", [1, 2])
def test_the_notes_name_a_pod_of_the_engines(
    chart: Path, helm: Callable[..., "subprocess.CompletedProcess[str]"], num_hosts: int
) -> None:
    done = helm("install", "test", str(chart), "--dry-run=client", "--set", f"engine.hosts={num_hosts}")
    assert done.returncode == 0, done.stderr
    manifests, _, notes = done.stdout.partition("\nNOTES:\n")
    objects = yaml.safe_load_all(manifests[manifests.index("\n---\n") :])
    named = [one["metadata"]["name"] for one in objects if one and one["kind"] in ("StatefulSet", "LeaderWorkerSet")]
    assert re.findall(r"kubectl logs (\S+)-0`", notes) == named
