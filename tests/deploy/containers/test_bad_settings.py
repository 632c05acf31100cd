"""What can be wrong from the start: one clear line each, no traceback, no restart storm."""

import json
import re
import shutil
import socket
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]
HERE = Path(__file__).parent
DEMO_MODEL = Path(__file__).resolve().parents[3] / "engine" / "demo" / "model"
DEMO_MODEL_INSIDE = "/opt/chairlift/lib/python3.11/site-packages/engine/demo/model"
# Volumes with no room, and what has no GPU to wait for.
TMPFS = '{{driver_opts: {{type: tmpfs, device: tmpfs, o: "size={size},uid=10001,gid=10001,mode=0700"}}}}'
FULL = f"""
services:
  frontend: {{command: [chairlift-frontend, --host=0.0.0.0, --insecure-bind, "--engine=dns:nobody.:50052"]}}
volumes:
  kernels: {TMPFS.format(size="64k")}
  huggingface: {TMPFS.format(size="1m")}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, none of them of use."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)
    (folder / "empty").mkdir(mode=0o755)
    shutil.copytree(DEMO_MODEL, folder / "locked")
    (folder / "locked").chmod(0o700)
    shutil.copytree(DEMO_MODEL, folder / "truncated")
    with (folder / "truncated" / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)
    return folder


@pytest.fixture(scope="module")
def other(project: Any, make_stack: Callable[..., Any], models: Path) -> Iterator[Any]:
    """Another project with the same images, full disks, and an unknown engine name; nothing of it is up."""
    del project  # has built them
    made = make_stack("bad", FULL, RESTART="no", MODELS_DIR=str(models))
    yield made
    made.compose("--profile", "gpu", "down", "--volumes", "--timeout", "5", check=False)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"CHAIRLIFT_KV_CACHE_MEMORY_BYTES": "1T"},
            "--kv-cache-memory-bytes 1099511627776 is 1,024 GiB, the weights leave",
        ),
        ({"MODEL": "/models/none"}, "/models/none: no such file or folder"),
        ({"MODEL": "/models/empty"}, "/models/empty/config.json: no such file"),
        ({"MODEL": "/models/locked"}, "/models/locked/config.json: cannot be read: Permission denied"),
        ({"MODEL": "/models/truncated"}, "/models/truncated/model.safetensors: has 100000 bytes"),
        ({"MODEL": "a/b/c"}, "a/b/c: no such file or folder, and not a Hugging Face hub id"),
        ({"MODEL": "owner/demo", "HF_ENDPOINT": "http://nobody.:8000"}, "cannot be fetched from the Hugging Face hub"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else "",
)
def test_model_that_cannot_be_served_is_one_line(other: Any, settings: dict[str, str], complaint: str) -> None:
    other.compose("up", "--detach", "--no-deps", "engine", **settings)
    assert other.wait_ended("engine") == 2
    (line,) = other.complaints("engine")
    assert complaint in line


@pytest.mark.parametrize(
    ("service", "variable"), [("engine", "CHAIRLIFT_MAX_NUM_SEQS"), ("frontend", "CHAIRLIFT_WORKERS")]
)
def test_bad_flag_is_one_line_and_three_more_tries(other: Any, service: str, variable: str) -> None:
    other.compose("up", "--detach", "--no-deps", service, **{variable: "lots", "RESTART": "on-failure:3"})
    other.wait_until(lambda: other.inspect(service)["RestartCount"] == 3, service)
    assert other.wait_ended(service) == 2
    lines = other.complaints(service)
    assert len(lines) == 4
    assert len(set(lines)) == 1
    assert re.search(f"is lots, it must be a whole number .*from {variable}", lines[0])


def test_frontend_is_not_started_before_an_engine_that_fails(other: Any) -> None:
    other.compose("rm", "--stop", "--force", "frontend")  # of the test before
    done = other.compose("up", "--detach", check=False, MODEL="/models/none")
    assert done.returncode != 0
    assert "unhealthy" in done.stdout or "exited (2)" in done.stdout
    assert not other.containers("frontend") or other.inspect("frontend")["State"]["Status"] == "created"


@pytest.mark.parametrize(
    ("variable", "value"), [("RESTART", "sometimes"), ("GRPC_PORT", "abc"), ("ENGINE_START_PERIOD", "soon")]
)
def test_bad_setting_of_compose_stops_it(other: Any, variable: str, value: str) -> None:
    done = other.compose("up", "--detach", check=False, MODEL="/models/none", **{variable: value})
    assert done.returncode != 0
    assert "Traceback" not in done.stdout


def test_taken_port_is_named(other: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = other.compose("up", "--detach", "--no-deps", "frontend", check=False, GRPC_PORT=str(port))
    assert done.returncode != 0
    assert any(str(port) in line and "address already in use" in line for line in done.stdout.splitlines())


def test_no_gpu_is_said_by_docker(other: Any) -> None:
    done = other.compose("--profile", "gpu", "up", "--detach", "--no-deps", "engine-gpu", check=False)
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert 'could not select device driver "nvidia"' in done.stdout


def test_frontend_without_an_engine_says_so_once_and_is_unhealthy(other: Any) -> None:
    other.compose("up", "--detach", "--no-deps", "frontend")
    other.wait_until(lambda: len(other.health("frontend")) >= 2, "frontend")
    assert {check["ExitCode"] for check in other.health("frontend")} == {1}
    assert all("NOT_SERVING" in check["Output"] for check in other.health("frontend"))
    with pytest.raises(urllib.error.HTTPError, match="503"):
        other.get("/health")
    assert len([line for line in other.log("frontend").splitlines() if "no address of nobody" in line]) == 1
    assert other.complaints("frontend") == []


def test_full_cache_of_kernels_costs_a_warning(other: Any) -> None:
    other.compose("up", "--detach", "--no-deps", "engine")
    # What other processes compiled is not on the disk: the engine compiles again, and says so at the first kernel.
    other.wait_until(lambda: "No space left on device" in other.log("engine"), "engine")
    (line,) = [line for line in other.log("engine").splitlines() if "No space left on device" in line]
    assert "WARNING" in line
    assert "every start compiles them again" in line
    assert other.inspect("engine")["State"]["Running"]
    assert other.complaints("engine") == []
    other.compose("stop", "--timeout", "5", "engine")


@pytest.fixture
def start_hub(docker: Callable[..., str], image: Callable[[str], str]) -> Iterator[Callable[[Any], None]]:
    """start_hub(stack): a Hugging Face hub for that project's engine, at http://hub.:8000."""
    names = []

    def start(stack: Any) -> None:
        names.append(f"{stack.name}-hub")
        docker(
            "run", "--detach", "--rm", "--name", names[-1],
            "--network", f"{stack.name}_egress", "--network-alias", "hub",
            "--volume", f"{HERE / 'fake_hub.py'}:/fake_hub.py:ro", image("engine"),
            "python", "/fake_hub.py", DEMO_MODEL_INSIDE, "8000",
        )  # fmt: skip

    yield start
    for name in names:
        docker("rm", "--force", name)


def test_full_cache_of_models_is_one_line(other: Any, start_hub: Callable[[Any], None]) -> None:
    other.compose("up", "--detach", "--no-deps", "engine", MODEL="a/b/c")  # makes the networks if there are none
    start_hub(other)
    other.compose("up", "--detach", "--no-deps", "engine", MODEL="owner/demo", HF_ENDPOINT="http://hub.:8000")
    assert other.wait_ended("engine") == 2
    (line,) = other.complaints("engine")
    assert "cannot be fetched from the Hugging Face hub: [Errno 28] No space left on device" in line
    assert other.log("engine").splitlines()[-1] == line


def test_fetched_model_and_its_packed_weights_are_kept(stack: Any, start_hub: Callable[[Any], None]) -> None:
    """Of the pair itself: fetched once, and served again when the hub is gone."""
    start_hub(stack)
    settings = {
        "MODEL": "owner/demo",
        "CHAIRLIFT_SERVED_MODEL_NAME": "fetched",
        "CHAIRLIFT_PACKED_CACHE": "/var/cache/chairlift/huggingface",
    }
    stack.compose("up", "--detach", HF_ENDPOINT="http://hub.:8000", **settings)
    stack.wait_healthy("frontend")
    models = json.loads(stack.get("/v1/models"))["data"]
    assert models[0]["id"] == "fetched"
    stack.wait_until(lambda: "Packed weights are saved" in stack.log("engine"), "engine")
    stack.compose("up", "--detach", HF_HUB_OFFLINE="1", **settings)
    stack.wait_healthy("frontend")
    assert stack.tokens()
    assert "Packed weights are those of an earlier start" in stack.log("engine")
