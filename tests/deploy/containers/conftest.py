"""compose.yaml with a real Docker engine. Without one all of this folder is skipped, and says so.

The images are built once, under names of their own. Every file finds the pair up, with one engine, and may do to it
what it likes. About four minutes when the images' layers are there; the first time Docker installs everything, which
takes as long as the network needs. `docker compose` is used where it is there, else `docker-compose`.
"""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from chairlift import Client, GenerationError
from chairlift.v1 import generation_service_pb2 as pb
from tests.hang import HANG_S

ROOT = Path(__file__).resolve().parents[3]
# What a start may take on two busy cores: the first one compiles the CPU kernels.
START_TIMEOUT_S = 300.0
GENERATIONS = {"current": ["docker", "compose"], "1.29": ["docker-compose"]}
# A stream that no client reads stops long before its end: with these the connection's window has no room for all of it.
LONG = {"max_tokens": 900, "ignore_end_token": True, "return_token_ids": True, "top_logprobs": 10, "temperature": 1.0}
# Prefix of the tests' images: other checkouts have images of their own.
PREFIX = f"chairlift-test-{os.getpid()}"
IMAGES = {"engine": "engine", "engine-gpu": "engine", "frontend": "frontend", "loadgen": "loadgen"}  # no GPU here
# Variables that must not come from the shell.
SETTINGS = re.compile(r"[A-Z_]*(MODEL|PORT|RESTART|MEMORY|LOG_DRIVER|PERIOD)[A-Z_]*$|GRAFANA_|HF_|CHAIRLIFT_|COMPOSE_")


def run(command: list[str], **options: Any) -> "subprocess.CompletedProcess[str]":
    """Runs a command with both its streams in one."""
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        **options,
    )  # fmt: skip


def works(command: list[str]) -> bool:
    """Whether a command is there and succeeds."""
    try:
        return run(command).returncode == 0
    except FileNotFoundError:
        return False


def docker(*arguments: str) -> str:
    """Runs docker; returns what it prints on either stream."""
    done = run(["docker", *arguments])
    assert done.returncode == 0, done.stdout
    return done.stdout


@functools.cache
def base_image() -> Mapping[str, str]:
    """The setting for a local base image: it came from no registry, so it has no digest."""
    form = "{{len .RepoDigests}}"
    done = run(["docker", "image", "inspect", "--format", form, "python:3.11-slim"])
    return {"BASE_IMAGE": "python:3.11-slim"} if (done.returncode, done.stdout.strip()) == (0, "0") else {}


def free_ports(number: int) -> list[int]:
    """Free ports of this machine, all different."""
    with contextlib.ExitStack() as probes:
        found = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [int(probe.getsockname()[1]) for probe in found]


def image(service: str) -> str:
    """What the tests call a service's image."""
    return f"{PREFIX}-{IMAGES[service]}"


class Answer(NamedTuple):
    """A whole stream."""

    token_ids: list[int]
    finished: pb.Finished


@dataclass(frozen=True)
class Stack:
    """One project: `docker compose --project-name NAME --env-file FILE --file compose.yaml ...`."""

    command: tuple[str, ...]
    name: str
    env_file: Path
    settings: Mapping[str, str]
    files: tuple[Path, ...]

    @property
    def target(self) -> str:
        """The frontend's gRPC port."""
        return f"127.0.0.1:{self.settings['GRPC_PORT']}"

    @property
    def build_settings(self) -> Mapping[str, str]:
        """What its images are built from, where that is not what compose.yaml says."""
        return base_image()

    @property
    def filters(self) -> tuple[str, str]:
        """Flags that leave docker's lists with what is this project's."""
        return "--filter", f"label=com.docker.compose.project={self.name}"

    def compose(self, *arguments: str, check: bool = True, **variables: str) -> "subprocess.CompletedProcess[str]":
        """Runs compose; `variables` win over the .env file, as a shell's do."""
        files = [word for file in ("compose.yaml", *self.files) for word in ("--file", str(file))]
        done = run(
            [*self.command, "--project-name", self.name, "--env-file", str(self.env_file), *files, *arguments],
            cwd=ROOT,
            env={
                **self.build_settings,
                **{name: value for name, value in os.environ.items() if not SETTINGS.match(name)},
                **variables,
            },
        )
        assert not check or done.returncode == 0, done.stdout
        return done

    def scale(self, num_engines: int) -> None:
        """Scales to this number of engines and waits until all are attached to the frontend."""
        self.compose("up", "--detach", "--scale", f"engine={num_engines}")
        self.wait_healthy("frontend")
        self.wait_until(lambda: sum(self.metric("engine_up").values()) == num_engines, "frontend")

    def containers(self, service: str) -> list[str]:
        """The ids of a service's containers, running or not, in the order of their numbers."""
        label = f"label=com.docker.compose.service={service}"
        form = '{{.Label "com.docker.compose.container-number"}} {{.ID}}'
        lines = docker("ps", "--all", "--no-trunc", *self.filters, "--filter", label, "--format", form).splitlines()
        return [line.split()[1] for line in sorted(lines)]

    def container(self, service: str) -> str:
        """The id of a service's one container."""
        (identity,) = self.containers(service)
        return identity

    def inspect(self, service: str) -> dict[str, Any]:
        """All that Docker knows of a service's one container."""
        found: dict[str, Any] = json.loads(docker("inspect", self.container(service)))[0]
        return found

    def log(self, service: str) -> str:
        """What a service's containers have printed."""
        return "".join(docker("logs", container) for container in self.containers(service))

    def complaints(self, service: str) -> list[str]:
        """The lines of a service's log that say what is wrong; that there is no traceback has been checked."""
        log = self.log(service)
        assert "Traceback" not in log
        return [line for line in log.splitlines() if " error: " in line]

    def health(self, service: str) -> list[dict[str, Any]]:
        """The last health checks of a service's one container, oldest first."""
        checks: list[dict[str, Any]] = self.inspect(service)["State"]["Health"]["Log"]
        return checks

    def wait_healthy(self, service: str) -> None:
        """Waits until Docker's health check of a service passes, in all its containers."""
        form = "{{.State.Health.Status}}"
        self.wait_until(
            lambda: set(docker("inspect", "--format", form, *self.containers(service)).split()) == {"healthy"}, service
        )

    def wait_ended(self, service: str) -> int:
        """Waits until a service has ended for good; returns its exit status."""
        self.wait(service, lambda state: state["Status"] == "exited")
        return int(self.inspect(service)["State"]["ExitCode"])

    def wait(self, service: str, is_there: Callable[[Mapping[str, Any]], bool]) -> None:
        """Waits for a state of a service's one container."""
        self.wait_until(lambda: is_there(self.inspect(service)["State"]), service)

    def wait_until(self, is_there: Callable[[], bool], service: str) -> None:
        """Waits for anything; `service` is whose log tells why it did not come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_there():
            assert time.monotonic() < deadline, self.log(service)
            time.sleep(0.2)  # other processes' states are polled; there is nothing to wait on

    def get(self, path: str, port: str = "HTTP_PORT") -> str:
        """The answer of a port to GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.settings[port]}{path}", timeout=HANG_S) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> dict[str, float]:
        """The values of one of the frontend's metrics by engine, summed over all other labels."""
        values: dict[str, float] = {}
        for labels, value in re.findall(rf"^chairlift:{name}\{{(.*)\}} (\S+)$", self.get("/metrics"), re.MULTILINE):
            (engine,) = re.findall(r'engine="(\d+)"', labels)
            values[engine] = values.get(engine, 0.0) + float(value)
        return values

    def run_streams(
        self, num_streams: int = 8, *, at_token: int = 0, act: Callable[[], object] | None = None
    ) -> list[Answer]:
        """Long streams at once, each with a seed of its own.

        Args:
            num_streams: number of streams.
            at_token: token of the first stream at which all of them stop reading.
            act: called then, before all of them continue.
        Returns: the answers by seed. That no token is missing or twice has been checked.
        """
        answers: dict[int, Answer] = {}
        errors: list[BaseException] = []
        lock, is_done = threading.Lock(), act is None

        def read(seed: int) -> None:
            nonlocal is_done
            token_ids: list[int] = []
            with Client(self.target) as client:
                stream = client.stream("Once upon a time", seed=seed, timeout_s=HANG_S, **LONG)
                for chunk in stream:
                    assert chunk.first_token_index == len(token_ids)
                    token_ids += chunk.token_ids
                    if len(token_ids) >= at_token and not is_done:
                        with lock:
                            if not is_done:
                                assert act is not None
                                act()
                                is_done = True
            assert stream.finished is not None
            answers[seed] = Answer(token_ids, stream.finished)

        def note(seed: int) -> None:
            try:
                read(seed)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=note, args=(seed,)) for seed in range(num_streams)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert is_done
        assert all(len(answer.token_ids) == 900 for answer in answers.values())
        return [answers[seed] for seed in range(num_streams)]

    @contextlib.contextmanager
    def slow_engines(self) -> Iterator[Callable[[], None]]:
        """Engines with a tenth of a core, so that a stream lasts longer than docker takes to do something to it.

        Yields: gives them back what they had.
        """
        engines = self.containers("engine")
        docker("update", "--cpus", "0.1", *engines)

        def speed_up() -> None:
            there = docker("ps", "--all", "--quiet", "--no-trunc").split()
            if left := [engine for engine in engines if engine in there]:
                docker("update", "--cpus", str(os.cpu_count()), *left)

        try:
            yield speed_up
        finally:
            speed_up()

    def cut_off(self, act: Callable[[], object]) -> GenerationError:
        """A long stream in which `act` is done at the first chunk; returns how it fails."""
        with self.slow_engines(), Client(self.target) as client:
            stream = iter(client.stream("Once upon a time", timeout_s=HANG_S, **LONG))
            next(stream)
            act()
            with pytest.raises(GenerationError) as caught:
                list(stream)
        return caught.value

    def tokens(self) -> list[int]:
        """A short answer, always the same."""
        with Client(self.target) as client:
            chunks = client.stream("Once upon a time", return_token_ids=True, max_tokens=8, temperature=0.0)
            return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.fixture(scope="session")
def command() -> tuple[str, ...]:
    """How compose is called here; skips where there is none."""
    if not works(["docker", "info"]):
        pytest.skip("needs Docker: no engine answers `docker info`")
    for words in GENERATIONS.values():
        if works([*words, "version"]):
            return tuple(words)
    pytest.skip("needs Docker's compose: neither `docker compose` nor `docker-compose` is here")


@pytest.fixture(params=GENERATIONS, scope="session")
def generation(request: pytest.FixtureRequest, command: tuple[str, ...]) -> tuple[str, ...]:
    """Each generation of compose that is here."""
    words = GENERATIONS[request.param]
    if not works([*words, "version"]):
        pytest.skip(f"there is no `{' '.join(words)}` here")
    return tuple(words)


@pytest.fixture(scope="session")
def make_stack(command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Stack]:
    """make_stack(name, override="", **settings): a project with ports of its own, not up yet."""

    def make(name: str, override: str = "", **settings: str) -> Stack:
        folder = tmp_path_factory.mktemp("compose")
        names = ("GRPC", "HTTP", "PROMETHEUS", "GRAFANA")
        ports = {f"{name}_PORT": str(port) for name, port in zip(names, free_ports(len(names)), strict=True)}
        lines = {**ports, **settings}
        (folder / "env").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        images = {service: {"image": image(service)} for service in IMAGES}
        (folder / "images.yaml").write_text(yaml.safe_dump({"services": images}))
        (folder / "override.yaml").write_text(override)
        files = [folder / name for name in ("images.yaml", "override.yaml") if (folder / name).stat().st_size]
        return Stack(command, f"chairlift-{name}-{os.getpid()}", folder / "env", lines, tuple(files))

    return make


@pytest.fixture(scope="session")
def project(make_stack: Callable[..., Stack]) -> Iterator[Stack]:
    """The images built; the pair is up once the first test has needed it, and down after the last one."""
    made = make_stack("test", CHAIRLIFT_SERVED_MODEL_NAME="from-the-env-file", CHAIRLIFT_FAILOVER_TIMEOUT="20")
    try:
        made.compose("--profile", "load", "build")
        yield made
    finally:
        made.compose("--profile", "monitoring", "down", "--volumes", "--timeout", "20", check=False)
        # Those of the project's own name too, from the commands of the documentation. Without what they were made
        # from the next build would fetch everything again.
        named = docker("images", "--format", "{{.Repository}}", f"{PREFIX}*").split()
        run(["docker", "image", "rm", "--no-prune", *named])


@pytest.fixture(scope="module")
def stack(project: Stack) -> Stack:
    """The pair, up and healthy, with one engine."""
    project.scale(1)
    return project


@pytest.fixture(name="image", scope="session")
def image_name() -> Callable[[str], str]:
    """image(service): what its image is called here."""
    return image


@pytest.fixture(name="docker", scope="session")
def docker_command() -> Callable[..., str]:
    """docker(argument, ...): runs docker; returns what it prints on either stream."""
    return docker
