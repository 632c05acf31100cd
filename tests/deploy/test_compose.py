"""compose.yaml with a real Docker engine: from the build to `down`, with each service killed and restarted between.

About two minutes when the images' layers are there; the first time Docker installs everything, which takes as long as
the network needs.
"""

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from frontend.client import ChairliftClient, GenerationError

# What a start may take on two busy cores: the first one compiles the CPU kernels.
START_TIMEOUT_S = 300.0


def compose_command() -> list[str] | None:
    """How compose is called here, the current one first; None: there is no Docker engine, or no compose."""
    if not _works(["docker", "info"]):
        return None
    return next((words for words in (["docker", "compose"], ["docker-compose"]) if _works([*words, "version"])), None)


@dataclass(frozen=True)
class Stack:
    """One project: `docker compose --project-name NAME --env-file FILE ...`."""

    command: tuple[str, ...]
    root: Path
    name: str
    env_file: Path

    def compose(self, *arguments: str, check: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs compose; `variables` win over the .env file, as a shell's do."""
        done = run(
            [*self.command, "--project-name", self.name, "--env-file", str(self.env_file), *arguments],
            cwd=self.root,
            env={**_clean_environment(), **variables},
        )
        assert not check or done.returncode == 0, done.stdout
        return done

    def container(self, service: str) -> str:
        """The id of a service's one container, running or not."""
        label = f"label=com.docker.compose.service={service}"
        (identity,) = docker("ps", "--all", "--quiet", "--no-trunc", *self.filters, "--filter", label).split()
        return identity

    @property
    def filters(self) -> tuple[str, str]:
        """Flags that leave docker's lists with what is this project's."""
        return "--filter", f"label=com.docker.compose.project={self.name}"

    def inspect(self, service: str) -> dict[str, Any]:
        """All that Docker knows of a service's container."""
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)))[0]
        return found

    def log(self, service: str) -> str:
        """What a service's container has printed."""
        return docker("logs", self.container(service))

    def wait_healthy(self, service: str) -> None:
        """Waits until Docker's health check of a service passes."""
        self.wait(service, lambda state: state["Health"]["Status"] == "healthy")

    def wait(self, service: str, is_there: Callable[[Mapping[str, Any]], bool]) -> None:
        """Waits for a state of a service's container."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_there(state := self.inspect(service)["State"]):
            assert time.monotonic() < deadline, f"{state}\n{self.log(service)}"
            time.sleep(0.2)  # another process's state is polled; there is nothing to wait on


def docker(*arguments: str) -> str:
    """Runs docker; returns what it prints on either stream."""
    done = run(["docker", *arguments])
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command with both its streams in one."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        **options,
    )  # fmt: skip


def _clean_environment() -> dict[str, str]:
    known = ("MODEL", "GRPC_PORT", "HTTP_PORT", "PROMETHEUS_", "GRAFANA_", "RESTART", "HF_", "CHAIRLIFT_", "COMPOSE_")
    return {name: value for name, value in os.environ.items() if not name.startswith(known)}


def _works(command: list[str]) -> bool:
    try:
        return run(command).returncode == 0
    except FileNotFoundError:
        return False


COMMAND = compose_command()
ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.docker,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(COMMAND is None, reason="needs Docker: no engine answers `docker info`, or there is no compose"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    """Those of gRPC and HTTP on this machine."""
    return free_port(), free_port()


@pytest.fixture(scope="module")
def watch_ports() -> dict[str, int]:
    """Those of the profile monitoring, by service."""
    return {"prometheus": free_port(), "grafana": free_port()}


@pytest.fixture(scope="module")
def stack(
    ports: tuple[int, int], watch_ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The pair, up and healthy."""
    assert COMMAND is not None
    env_file = tmp_path_factory.mktemp("compose") / "env"
    settings = {
        "GRPC_PORT": ports[0],
        "HTTP_PORT": ports[1],
        "PROMETHEUS_PORT": watch_ports["prometheus"],
        "GRAFANA_PORT": watch_ports["grafana"],
        "CHAIRLIFT_SERVED_MODEL_NAME": "from-the-env-file",
    }
    env_file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    made = Stack(tuple(COMMAND), ROOT, f"chairlift-test-{os.getpid()}", env_file)
    try:
        made.compose("--profile", "load", "build")
        made.compose("up", "--detach")
        made.wait_healthy("frontend")
        yield made
    finally:
        made.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "20", check=False)


def answer(ports: tuple[int, int]) -> str:
    with ChairliftClient(f"127.0.0.1:{ports[0]}") as client:
        return "".join(chunk.text for chunk in client.stream("Once upon a time", max_tokens=8, temperature=0.0))


def test_engine_was_healthy_before_the_frontend_started(stack: Stack) -> None:
    engine, frontend = stack.inspect("engine")["State"], stack.inspect("frontend")["State"]
    started = datetime.fromisoformat(frontend["StartedAt"])
    healthy = [datetime.fromisoformat(check["End"]) for check in engine["Health"]["Log"] if check["ExitCode"] == 0]
    assert min(healthy) <= started
    assert "SERVING" in engine["Health"]["Log"][-1]["Output"]


def test_answers_stream_through_both_doors(stack: Stack, ports: tuple[int, int]) -> None:
    text = answer(ports)
    assert len(text) > 8
    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{ports[1]}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line[6:] for line in response.read().decode().splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == text
    assert chunks[0]["model"] == "from-the-env-file"


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_container_can_change_nothing_but_its_caches(stack: Stack, service: str) -> None:
    container = stack.container(service)
    look = "id -u; grep -E 'CapEff|NoNewPrivs' /proc/1/status; cat /proc/1/mounts"
    uid, *status = docker("exec", container, "sh", "-c", look).splitlines()
    assert uid == "10001"
    assert status[:2] == ["CapEff:\t0000000000000000", "NoNewPrivs:\t1"]
    mounts = {line.split()[1]: line.split()[3].split(",") for line in status[2:]}
    assert mounts["/"][0] == "ro"
    # Docker's own files are root's; everything else that may be written is sized, or a cache.
    writable = {path for path, flags in mounts.items() if flags[0] == "rw" and not path.startswith(("/proc", "/dev"))}
    caches = {"/var/cache/chairlift/kernels", "/var/cache/chairlift/huggingface"} if service == "engine" else set()
    assert writable - {"/etc/resolv.conf", "/etc/hostname", "/etc/hosts", "/sys/fs/cgroup"} == {"/tmp", *caches}
    assert any(flag.startswith("size=") for flag in mounts["/tmp"])
    limits = stack.inspect(service)["HostConfig"]
    assert limits["PidsLimit"] > 0
    assert limits["Memory"] > 0


def test_engine_has_no_port_on_this_machine(stack: Stack, ports: tuple[int, int]) -> None:
    assert not stack.inspect("engine")["HostConfig"]["PortBindings"]
    bindings = stack.inspect("frontend")["HostConfig"]["PortBindings"]
    assert {
        (port, binding["HostIp"], binding["HostPort"]) for port, bound in bindings.items() for binding in bound
    } == {
        ("50051/tcp", "127.0.0.1", str(ports[0])),
        ("8000/tcp", "127.0.0.1", str(ports[1])),
    }
    networks = json.loads(docker("network", "inspect", f"{stack.name}_backend", f"{stack.name}_public"))
    assert [network["Internal"] for network in networks] == [True, False]
    assert stack.container("engine") not in networks[1]["Containers"]


def test_load_generator_replays_a_trace(stack: Stack, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"arrival_s": 0.1 * i, "input_tokens": 20 + i, "output_tokens": 8} for i in range(10)]
    trace.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    done = stack.compose(
        "--profile", "load", "run", "--rm", "-v", f"{trace}:/trace.jsonl:ro", "loadgen",
        "replay", "--trace", "/trace.jsonl",
    )  # fmt: skip
    words = " ".join(done.stdout.split())
    assert "Errors: 0" in words
    assert "Output tokens: 80 of 80" in words


def read_json(port: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
        return json.load(response)


def start_watcher(stack: Stack, service: str) -> None:
    """Starts a service of the profile monitoring and waits for it; skips where its image cannot be had."""
    image = yaml.safe_load((stack.root / "compose.yaml").read_text())["services"][service]["image"]
    if not _works(["docker", "image", "inspect", image]) and not _works(["docker", "pull", image]):
        pytest.skip(f"{image} is not here and cannot be pulled")
    stack.compose("--profile", "monitoring", "up", "--detach", "--no-deps", service)
    stack.wait_healthy(service)


def test_prometheus_watches_the_frontend(stack: Stack, watch_ports: dict[str, int]) -> None:
    start_watcher(stack, "prometheus")

    def targets() -> list[tuple[str, str]]:
        data = read_json(watch_ports["prometheus"], "/api/v1/targets")["data"]
        return [(target["labels"]["job"], target["health"]) for target in data["activeTargets"]]

    stack.wait("prometheus", lambda _: targets() == [("chairlift", "up")])


def test_grafana_shows_the_dashboard_to_everybody_and_lets_nobody_change_it(
    stack: Stack, watch_ports: dict[str, int]
) -> None:
    start_watcher(stack, "grafana")
    port = watch_ports["grafana"]
    shown = read_json(port, "/api/dashboards/uid/chairlift")
    assert shown["meta"]["provisioned"] is True
    assert shown["meta"]["canSave"] is False
    assert len(shown["dashboard"]["panels"]) > 10
    with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
        read_json(port, "/api/admin/settings")


def test_killed_engine_is_unavailable_and_comes_back(stack: Stack, ports: tuple[int, int]) -> None:
    before = answer(ports)
    docker("kill", stack.container("engine"))
    with pytest.raises(GenerationError) as caught:
        answer(ports)
    assert caught.value.status is grpc.StatusCode.UNAVAILABLE
    stack.wait("frontend", lambda state: state["Health"]["Status"] == "unhealthy")
    stack.compose("up", "--detach")
    stack.wait_healthy("frontend")
    assert answer(ports) == before
    assert "Traceback" not in stack.log("frontend")


def test_crashed_engine_is_started_again_by_docker(stack: Stack, ports: tuple[int, int]) -> None:
    restarts = stack.inspect("engine")["RestartCount"]
    # The brackets: this shell's own command line must not match.
    kill = "for p in /proc/[0-9]*; do grep -q 'bin/[c]hairlift-engine' $p/cmdline && kill -9 ${p#/proc/}; done; true"
    docker("exec", stack.container("engine"), "sh", "-c", kill)
    stack.wait("engine", lambda state: stack.inspect("engine")["RestartCount"] == restarts + 1 and state["Running"])
    stack.wait_healthy("engine")
    stack.wait_healthy("frontend")
    assert answer(ports)
    assert "the engine was killed" in stack.log("engine")


def test_killed_frontend_comes_back(stack: Stack, ports: tuple[int, int]) -> None:
    docker("kill", stack.container("frontend"))
    stack.compose("up", "--detach")
    stack.wait_healthy("frontend")
    assert answer(ports)


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_restarted_service_drains_and_comes_back(stack: Stack, ports: tuple[int, int], service: str) -> None:
    drained = stack.log(service).count("drained ")
    stack.compose("restart", service)
    stack.wait_healthy(service)
    stack.wait_healthy("frontend")
    assert answer(ports)
    assert stack.log(service).count("drained ") == drained + 1


def test_engine_gives_way_to_the_one_on_a_gpu(stack: Stack, ports: tuple[int, int]) -> None:
    # No GPU here: something that answers under that name will do.
    name = f"{stack.name}-gpu"
    network = ("--network", f"{stack.name}_backend", "--network-alias", "engine-gpu")
    docker(
        "run", "--detach", "--rm", "--name", name, *network, "chairlift-engine", "python", "-m", "http.server", "50052"
    )
    try:
        stack.wait("engine", lambda _: "this one stands by" in stack.log("engine"))
        assert stack.inspect("engine")["State"]["Running"]
    finally:
        docker("kill", name)
    stack.compose("restart", "engine")
    stack.wait_healthy("engine")
    stack.wait_healthy("frontend")
    assert answer(ports)


@pytest.mark.parametrize(
    ("variable", "value", "complaint"),
    [
        ("CHAIRLIFT_MAX_NUM_SEQS", "lots", "environment variable CHAIRLIFT_MAX_NUM_SEQS=lots: must be a whole number"),
        ("MODEL", "/models/none", "/models/none: no such folder"),
    ],
)
def test_bad_setting_is_one_line_and_a_few_tries(stack: Stack, variable: str, value: str, complaint: str) -> None:
    other = Stack(stack.command, stack.root, f"{stack.name}-bad", stack.env_file)
    try:
        done = other.compose("up", "--detach", check=False, **{variable: value})
        assert done.returncode != 0  # the frontend waits for a healthy engine, in vain
        other.wait("engine", lambda state: state["Status"] == "exited")
        assert other.inspect("engine")["State"]["ExitCode"] == 2
        assert other.inspect("engine")["RestartCount"] == 3
        log = other.log("engine")
    finally:
        other.compose("down", "--volumes", check=False)
    lines = [line for line in log.splitlines() if "error" in line]
    assert len(set(lines)) == 1
    assert len(lines) == 4
    assert complaint in lines[0]
    assert "Traceback" not in log


def test_taken_port_is_named(stack: Stack, ports: tuple[int, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = stack.compose("up", "--detach", check=False, GRPC_PORT=str(port))
    assert done.returncode != 0
    assert any(str(port) in line and "address already in use" in line for line in done.stdout.splitlines())
    stack.compose("up", "--detach")
    stack.wait_healthy("frontend")
    assert answer(ports)


def test_down_leaves_nothing(stack: Stack) -> None:
    stack.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "20")
    assert docker("ps", "--all", "--quiet", *stack.filters) == ""
    assert docker("network", "ls", "--quiet", *stack.filters) == ""
    assert docker("volume", "ls", "--quiet", *stack.filters) == ""
