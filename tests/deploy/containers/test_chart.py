"""What the chart starts, as containers under load: rolling updates, a lost engine, more and fewer. No request fails."""

import json
import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.containers.cluster import Cluster, render
from tests.hang import HANG_S
from tests.support import chart_tools

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]
PROMPTS_PER_RUN = 60


@pytest.fixture(scope="module")
def cluster(project: Any, docker: Callable[..., str], image: Callable[[str], str]) -> Iterator[Cluster]:
    """Two frontends and two engines of the chart, ready."""
    helm = chart_tools.find_helm()
    if helm is None:
        pytest.skip("needs helm: `make chart-tools` fetches it")
    short = {"frontend__maxConnectionAgeSeconds": 8, "frontend__preStopSeconds": 12}
    manifests = render(helm, engine__flags={"threads": 1, "max-num-seqs": 16}, engine__replicas=2, **short)
    made = Cluster(docker, f"chart-{os.getpid()}", manifests, {half: image(half) for half in ("engine", "frontend")})
    try:
        first = made.start("engine")
        made.wait_ready("engine", first)  # the others find its compiled kernels
        scale_engines(made, 2)
        for _ in range(2):
            made.wait_ready("frontend", made.start("frontend"))
        made.balance()
        wait_attached(made)
        yield made
    finally:
        made.remove()


def scale_engines(cluster: Cluster, number: int) -> None:
    """Scales as the StatefulSet does: all new ones at once, or the newest ones away at once."""
    pods = cluster.pods["engine"]
    if number < len(pods):
        leaving = [threading.Thread(target=cluster.stop, args=("engine", pod)) for pod in pods[number:]]
        for thread in leaving:
            thread.start()
        for thread in leaving:
            thread.join()
    for pod in [cluster.start("engine") for _ in range(number - len(pods))]:
        cluster.wait_ready("engine", pod)


def wait_attached(cluster: Cluster) -> None:
    """Waits until every frontend uses all engines: what minReadySeconds gives them time for."""
    for pod in cluster.pods["frontend"]:
        cluster.wait_until(lambda pod=pod: num_attached(cluster, pod) == len(cluster.pods["engine"]), pod)


def num_attached(cluster: Cluster, pod: str) -> int:
    with urllib.request.urlopen(f"http://{cluster.address(pod)}:8000/metrics", timeout=HANG_S) as response:
        page = response.read().decode()
    return len(re.findall(r"^chairlift:engine_up\{.*\} 1\.0$", page, re.MULTILINE))


@contextmanager
def load(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Runs of the load generator with 8 streams at a time, until the end of the block and once after it.

    Raises: AssertionError: a request failed.
    """
    is_over, results = threading.Event(), []

    def generate() -> None:
        while not (results and is_over.is_set()):
            results.append(one_run(cluster.target, folder / str(len(results))))

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    results.append(one_run(cluster.target, folder / "after"))
    assert [result for result in results if result != (PROMPTS_PER_RUN, 0, 0)] == []


def one_run(target: str, folder: Path) -> tuple[int, int, int]:
    """Returns the numbers of complete and of failed requests, and the exit status."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "loadgen", "run", "--target", target, "--result-dir", str(folder)),
            *("--num-prompts", str(PROMPTS_PER_RUN), "--concurrency", "8"),
            *("--random-input-len", "16-200", "--random-output-len", "20-400"),
        ],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = list(folder.rglob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    flat = [one for one in found if isinstance(one, dict) and "completed" in one]
    assert flat, done.stdout + done.stderr
    return flat[0]["completed"], flat[0]["failed"], done.returncode


def test_rolling_update_of_engines(cluster: Cluster, tmp_path: Path) -> None:
    old = list(cluster.pods["engine"])
    with load(cluster, tmp_path):
        for pod in reversed(old):  # the order of a StatefulSet, which replaces one at a time
            cluster.stop("engine", pod)
            cluster.wait_ready("engine", cluster.start("engine"))
            wait_attached(cluster)
    assert not set(old) & set(cluster.pods["engine"])


def test_rolling_update_of_frontends(cluster: Cluster, tmp_path: Path) -> None:
    old = list(cluster.pods["frontend"])
    with load(cluster, tmp_path):
        for pod in old:  # a Deployment with one more than there were and none less
            cluster.wait_ready("frontend", cluster.start("frontend"))
            cluster.balance()
            cluster.stop("frontend", pod)
    assert not set(old) & set(cluster.pods["frontend"])
    wait_attached(cluster)


def test_lost_engine_and_its_successor(cluster: Cluster, tmp_path: Path) -> None:
    with load(cluster, tmp_path):
        cluster.kill("engine", cluster.pods["engine"][0])
        cluster.wait_ready("engine", cluster.start("engine"))
        wait_attached(cluster)


def test_one_engine_to_three_and_back(cluster: Cluster, tmp_path: Path) -> None:
    scale_engines(cluster, 1)
    with load(cluster, tmp_path):
        scale_engines(cluster, 3)
        wait_attached(cluster)
        scale_engines(cluster, 1)
