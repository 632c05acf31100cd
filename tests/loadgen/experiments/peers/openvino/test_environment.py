import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from loadgen.experiments.peers.openvino import environment
from loadgen.experiments.peers.openvino.environment import REQUIREMENTS, cache_dir, convert_checkpoint, openvino_python


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A cache folder of its own; what would be run is noted instead."""
    noted: list[list[str]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(environment.venv, "create", lambda folder, with_pip: folder.mkdir(parents=True))
    monkeypatch.setattr(environment, "_run", lambda command, timeout_s: noted.append([*map(str, command)]))
    return noted


def silent(_: str) -> None:
    pass


def test_environment_is_made_once_with_our_torch_and_without_torchvision(commands: list[list[str]]) -> None:
    python = openvino_python(silent)
    install, uninstall = commands
    assert install[:4] == [str(python), "-m", "pip", "install"]
    assert set(REQUIREMENTS) < set(install)
    (torch_pin,) = (word for word in install if word.startswith("torch=="))
    assert "+" not in torch_pin
    assert uninstall[3] == "uninstall"
    assert uninstall[-1] == "torchvision"
    assert openvino_python(silent) == python
    assert len(commands) == 2
    assert python.is_relative_to(cache_dir())


def test_half_made_environment_is_made_anew(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: Sequence[str | Path], timeout_s: float) -> None:
        raise BenchmarkError("no network")

    with monkeypatch.context() as patch:
        patch.setattr(environment, "_run", fail)
        with pytest.raises(BenchmarkError, match="no network"):
            openvino_python(silent)
    openvino_python(silent)
    assert len(commands) == 2


def test_python_without_venv_is_told(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, with_pip: bool) -> None:
        raise subprocess.CalledProcessError(1, "ensurepip")

    monkeypatch.setattr(environment.venv, "create", fail)
    with pytest.raises(BenchmarkError, match=r"no virtual environment in .*ensurepip"):
        openvino_python(silent)


def test_failing_command_is_told_with_its_last_lines() -> None:
    script = "import sys; print('\\n'.join(map(str, range(100)))); sys.exit(3)"
    with pytest.raises(BenchmarkError, match=r"(?s)exit status 3\n85\n.*99"):
        environment._run([sys.executable, "-c", script], 60.0)


def test_endless_command_is_ended() -> None:
    with pytest.raises(BenchmarkError, match=r"no end after 0\.05 s"):
        environment._run([sys.executable, "-c", "import time; time.sleep(60)"], 0.05)


def test_conversion_names_checkpoint_format_and_folder(commands: list[list[str]]) -> None:
    out = convert_checkpoint(Path("/env/bin/python"), Path("/model"), Path("/out"), "int8")
    (command,) = commands
    assert out == Path("/out")
    assert command[0] == "/env/bin/optimum-cli"
    assert command[-3:] == ["--weight-format", "int8", "/out"]
    assert command[command.index("--model") + 1] == "/model"
