from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from loadgen.experiments.peers.environment import Environment
from loadgen.experiments.peers.openvino import environment
from loadgen.experiments.peers.openvino.environment import REQUIREMENTS, convert_checkpoint, openvino_python


def test_environment_has_our_torch_and_no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Environment] = []

    def note(self: Environment, progress: Callable[[str], None]) -> Path:
        made.append(self)
        return self.python

    monkeypatch.setattr(Environment, "make", note)
    python = openvino_python(print)
    (found,) = made
    assert python == found.python
    assert set(REQUIREMENTS) < set(found.requirements)
    (torch_pin,) = (word for word in found.requirements if word.startswith("torch=="))
    assert "+" not in torch_pin
    assert found.unwanted == ("torchvision",)


@pytest.mark.parametrize("weight_format", ["fp32", "int8"])
def test_conversion_names_checkpoint_format_and_folder(weight_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(command: Sequence[str | Path], timeout_s: float, variables: Mapping[str, str]) -> None:
        commands.append([*map(str, command)])
        assert variables == {"HF_HUB_OFFLINE": "1"}

    commands: list[list[str]] = []
    monkeypatch.setattr(environment, "run_command", note)
    out = convert_checkpoint(Path("/env/bin/python"), Path("/model"), Path("/out"), weight_format)
    (command,) = commands
    assert out == Path("/out")
    assert command[0] == "/env/bin/optimum-cli"
    assert command[command.index("--model") + 1] == "/model"
    task = command.index("--task")
    assert command[task + 2 :] == ["--weight-format", weight_format, "/out"]
