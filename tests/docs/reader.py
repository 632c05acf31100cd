"""Runs the pages' commands: in a folder like a fresh clone, beside the pair that the pages assume to run.

What a page says is done as it stands, but for addresses, which become free ones, and for placeholders.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from chairlift import Client
from engine.demo import MODEL_DIR
from loadgen.processes import held_port
from tests.docs.pages import ROOT, Command, all_commands
from tests.docs.proofs import Proof, proof_of
from tests.hang import HANG_S, START_HANG_S

COPIED = ("Makefile", "pyproject.toml", "compose.yaml", ".env.example", "deploy", "docs/clients", "protos")
SERVING = (
    (r"chairlift-engine", r"engine: serving on (\S+), model"),
    (r"chairlift-frontend", r"engine \S+ attached: "),
    (r"make run|chairlift up|chairlift-loadgen mock-server", r"(?m)^serving on (\S+)$"),
)


@dataclass
class Server:
    """A command that runs until it is stopped."""

    process: subprocess.Popen[str]
    log: Path
    ports: Mapping[str, str]  # of the pages -> its own

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, pattern: str, timeout_s: float = START_HANG_S) -> re.Match[str]:
        """Until its output has it. Raises: AssertionError: it has ended, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.output)
            if match is not None:
                return match
            assert not ended, self.output
            assert time.monotonic() < deadline, f"no {pattern} in {self.output}"
            time.sleep(0.05)  # another process's output is polled; there is nothing to wait on

    def stop(self) -> int:
        """SIGTERM, as a script would; returns the status."""
        self.process.terminate()
        return self.process.wait(HANG_S)

    def kill(self) -> None:
        """Whatever is left of it."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


@dataclass
class Reader:
    """Invariant: `ports` says where what the pages say is at a port is served now."""

    folder: Path
    ports: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    served: dict[str, str] = field(default_factory=dict)  # what needs no second start -> what it printed
    programs: dict[str, dict[int, tuple[str, str]]] = field(default_factory=dict)  # page, line -> printed, error
    _done: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    _set_up: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in COPIED:
            source, target = ROOT / name, self.folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
            else:
                shutil.copy(source, target)
        environment = self.folder / ".venv"
        environment.mkdir()
        for entry in Path(sys.prefix).iterdir():
            if not entry.name.startswith("."):
                (environment / entry.name).symlink_to(entry)
        for stamp in (".python", ".torch", ".installed", ".installed-dev"):  # as `make` leaves it
            (environment / stamp).touch()

    def translate(self, text: str, ports: Mapping[str, str] | None = None) -> str:
        """The text with addresses that are served here and placeholders that exist."""
        for old, new in {**self.ports, **(ports or {})}.items():
            text = re.sub(rf"(?<=[: ]){old}\b", new, text)
        text = text.replace("/path/to/checkpoint", str(MODEL_DIR)).replace("example.org:", "localhost:")
        return text.replace("Client()", f'Client("{self.target}")')

    @property
    def target(self) -> str:
        """Where the pair is."""
        return f"127.0.0.1:{self.ports.get('50051', '50051')}"

    def environment(self, setup: str = "") -> dict[str, str]:
        """What a terminal knows, and what its block has exported."""
        known = {name: value for name, value in os.environ.items() if not name.startswith(("CHAIRLIFT_", "MAKE"))}
        known["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), known.get("PATH", "")])
        known["no_proxy"] = known["NO_PROXY"] = "127.0.0.1,localhost"
        known |= {"CHAIRLIFT_TARGET": self.target, **self.variables}
        if setup and setup not in self._set_up:
            shown = subprocess.run(
                ["bash", "-c", f"{setup}\nenv -0"], env=known, capture_output=True, check=True
            ).stdout
            pairs = (pair.partition("=") for pair in shown.decode().split("\0") if pair)
            self._set_up[setup] = {name: value for name, _, value in pairs if known.get(name) != value}
        return known | self._set_up.get(setup, {})

    def run(self, command: Command) -> subprocess.CompletedProcess[str]:
        """Runs a command once; who asks again gets what came of it, so that pages may repeat each other."""
        proof = proof_of(command)
        assert proof is not None
        if command.text not in self._done:
            if proof.after:
                self.run(neighbour(command, proof.after))
            if proof.given:
                subprocess.run(["bash", "-ec", proof.given], cwd=self.folder, env=self.environment(), check=True)
            if proof.beside:
                with self.serve(neighbour(command, proof.beside)) as server:
                    self._done[command.text] = self._run(command, proof, server.ports)
            else:
                self._done[command.text] = self._run(command, proof, {})
        return self._done[command.text]

    def _run(self, command: Command, proof: Proof, ports: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        text = command.text
        for long, short in proof.shorter:
            text = text.replace(long, short)
        return self.shell(self.translate(text, ports), self.environment(command.setup))

    def shell(self, text: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", text],
            cwd=self.folder,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    @contextmanager
    def serve(self, command: Command) -> Iterator[Server]:
        """Starts a command that serves, on ports of its own; in the end nothing is left of it."""
        with ExitStack() as held:
            own = {
                port: str(held.enter_context(held_port()))
                for port in re.findall(r"--(?:http-)?port (\d+)", command.text)
            }
            defaults = {name: str(held.enter_context(held_port())) for name in ("PORT", "HTTP_PORT", "ENGINE_PORT")}
            with self._served(command, own, defaults) as server:
                yield server

    @contextmanager
    def _served(self, command: Command, own: Mapping[str, str], defaults: Mapping[str, str]) -> Iterator[Server]:
        environment = self.environment(command.setup) | {f"CHAIRLIFT_{name}": port for name, port in defaults.items()}
        if "50052" in self.ports:
            environment["CHAIRLIFT_ENGINE"] = f"127.0.0.1:{self.ports['50052']}"
        log = self.folder / f"served-{defaults['PORT']}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", "exec " + self.translate(re.sub(r"\s*&\s*(#.*)?$", "", command.text), own)],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        server = Server(process, log, {"50051": defaults["PORT"], "8000": defaults["HTTP_PORT"], **own})
        try:
            server.wait_for(next(says for program, says in SERVING if re.match(program, command.plain)))
            yield server
        finally:
            server.kill()


def neighbour(command: Command, pattern: str) -> Command:
    """The command of the same page that begins so."""
    return next(one for one in all_commands() if one.page == command.page and re.match(pattern, one.plain))


def find(pattern: str) -> Command:
    """The first command of all pages that begins so."""
    return next(command for command in all_commands() if re.match(pattern, command.plain))


def write_traces(folder: Path) -> None:
    """Short traces under the names of long ones."""
    arrivals = [0.1 * index for index in range(12)] + [610 + index for index in range(5)]
    rows = [
        f"2023-11-16 18:{15 + int(at // 60):02}:{at % 60:010.7f},{960 + index},88" for index, at in enumerate(arrivals)
    ]
    (folder / "AzureLLMInferenceTrace_conv.csv").write_text(
        "\r\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])
    )
    (folder / "conversation_trace.jsonl").write_text(
        "".join(
            f'{{"timestamp": {3000 * index}, "input_length": 1024, "output_length": 96, "hash_ids": [0, {index}]}}\n'
            for index in range(1, 9)
        )
    )
    (folder / "trace.jsonl").write_text(
        "".join(f'{{"arrival_s": {index / 10}, "input_tokens": 20, "output_tokens": 8}}\n' for index in range(8))
    )


def is_served(target: str) -> bool:
    """Whether a frontend there writes what it is asked for."""
    with Client(target) as client:
        return bool(client.generate("Once upon a time", max_tokens=4, timeout_s=HANG_S).text)
