import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.peers import environment
from loadgen.experiments.peers.environment import Environment, cache_dir, run_command

Commands = list[tuple[list[str], dict[str, str]]]
PEER = Environment("peer", ("a==1", "b==2"), ("c",), ("--no-binary", "a"), {"FLAGS": "-x"})


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """A cache folder of its own; what would be run is noted instead, with its variables."""
    noted: Commands = []

    def note(command: Sequence[str | Path], timeout_s: float, variables: Mapping[str, str] | None = None) -> None:
        noted.append(([*map(str, command)], dict(variables or {})))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment.venv, "create", lambda folder, with_pip: folder.mkdir(parents=True))
    monkeypatch.setattr(environment, "run_command", note)
    return noted


def silent(_: str) -> None:
    pass


def test_environment_is_made_once(commands: Commands) -> None:
    assert not PEER.exists
    python = PEER.make(silent)
    (install, variables), (uninstall, _) = commands
    assert install == [str(python), "-m", "pip", "install", "--quiet", "--no-binary", "a", "a==1", "b==2"]
    assert variables == {"FLAGS": "-x"}
    assert uninstall[3:] == ["uninstall", "--quiet", "--yes", "c"]
    assert PEER.exists
    assert PEER.make(silent) == python
    assert len(commands) == 2
    assert python.is_relative_to(cache_dir())


@pytest.mark.parametrize(
    "other",
    [
        Environment("peer", ("a==2", "b==2"), ("c",), ("--no-binary", "a"), {"FLAGS": "-x"}),
        Environment("peer", ("a==1", "b==2"), ("c",), (), {"FLAGS": "-x"}),
        Environment("peer", ("a==1", "b==2"), ("c",), ("--no-binary", "a"), {"FLAGS": "-y"}),
        Environment("peer", ("a==1", "b==2"), ("c",), ("--no-binary", "a"), {"FLAGS": "-x"}, machine="another"),
    ],
    ids=["versions", "flags", "variables", "machine"],
)
def test_what_differs_has_a_folder_of_its_own(other: Environment) -> None:
    assert other.folder != PEER.folder


def test_half_made_environment_is_made_anew(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str | Path], timeout_s: float, variables: Mapping[str, str] | None = None) -> None:
        raise BenchmarkError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(environment, "run_command", fail)
        with pytest.raises(BenchmarkError, match="no network"):
            PEER.make(silent)
    assert not PEER.exists
    PEER.make(silent)
    assert len(commands) == 2


def test_python_without_venv_is_told(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, with_pip: bool) -> None:
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(environment.venv, "create", fail)
    with pytest.raises(BenchmarkError, match=r"no virtual environment in .*ensurepip"):
        PEER.make(silent)


def test_variables_are_those_of_the_command(tmp_path: Path) -> None:
    script = "import os, pathlib; pathlib.Path(os.environ['OUT']).touch(); assert 'PATH' in os.environ"
    run_command([sys.executable, "-c", script], 60.0, {"OUT": str(tmp_path / "out")})
    assert (tmp_path / "out").exists()


def test_failing_command_is_told_with_its_last_lines() -> None:
    script = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    with pytest.raises(BenchmarkError, match=r"(?s)exit status 3\n85\n.*99"):
        run_command([sys.executable, "-c", script], 60.0)


def test_endless_command_is_ended() -> None:
    with pytest.raises(BenchmarkError, match=r"no end after 0\.05 s"):
        run_command([sys.executable, "-c", "import time; time.sleep(60)"], 0.05)
