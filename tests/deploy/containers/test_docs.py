"""Every command of docs/docker.md, in its order, as somebody with a fresh checkout would type it."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "docker.md").read_text()
# They need a GPU, or images from the internet: compose reads the file for them and starts nothing.
NOT_STARTED = "--profile gpu up", "--profile monitoring up"


def commands() -> list[str]:
    """The lines of all blocks of shell, those that go on put together."""
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that git knows, in another folder, with a trace."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "trace.jsonl").write_text('{"arrival_s": 0.0, "input_tokens": 20, "output_tokens": 8}\n')
    models = folder / "models"
    shutil.copytree(ROOT / "engine" / "demo" / "model", models / "Qwen3-0.6B")
    models.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def shell(project: Any, checkout: Path) -> Iterator[Callable[[str], str]]:
    """shell(line): runs it in the checkout; returns what it printed. `docker compose` may be `docker-compose`."""
    compose = f'docker() {{ shift; command {shlex.join(project.command)} "$@"; }}'
    environment = {
        **project.build_settings,
        **{name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_CONFIG", "DOCKER_HOST") if name in os.environ},
        "COMPOSE_PROJECT_NAME": project.name,
        **{name: value for name, value in project.settings.items() if name.endswith("_PORT")},
    }

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", f"{compose}\n{line}"], cwd=checkout, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    project.compose("up", "--no-start")  # if nothing was: the volumes of this project, with what others compiled
    yield run
    run("docker compose down")


def test_every_command_works(project: Any, checkout: Path, shell: Callable[[str], str]) -> None:
    shown, num_engines = {}, []
    for line in commands():
        typed = line.replace("127.0.0.1:8000", f"127.0.0.1:{project.settings['HTTP_PORT']}")
        typed = typed.replace("/data/models", str(checkout / "models"))
        if any(words in line for words in NOT_STARTED):
            typed = re.sub(r" up\b", " config --quiet", typed)
        elif " up" in line and "--detach" not in line:
            typed = typed.replace(" up", " up --detach")
        shown[line] = shell(typed)
        if re.match(r"docker compose up\b", line):
            project.wait_healthy("frontend")
            project.wait_until(
                lambda: sum(project.metric("engine_up").values()) == len(project.containers("engine")), "frontend"
            )
            num_engines.append(len(project.containers("engine")))
    said = {words: text for line, text in shown.items() for words in ("curl", "down", "replay") if words in line}
    assert '"text"' in said["curl"]
    assert "Errors: 0" in " ".join(said["replay"].split())
    assert num_engines == [1, 1, 1, 2, 1]
    assert project.containers("engine")


def test_every_variable_of_the_table_is_in_the_example() -> None:
    table = re.findall(r"^\| (`[A-Z].*?) \|", PAGE, re.MULTILINE)
    names = {name for cell in table for name in re.findall(r"`([A-Z_]+)`", cell)}
    assert len(names) > 10
    assert names <= set(re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
