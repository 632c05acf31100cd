"""Tests of `chairlift.service.variables`."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from chairlift.service.variables import FLAG_VARIABLES, unknown_variables, warn_of_unknown_variables
from engine.config import parse_config
from frontend.cli import up
from frontend.config import parse_arguments

ROOT = Path(__file__).parents[3]
VARIABLE = re.compile(r"\bCHAIRLIFT_[A-Z_]*[A-Z]\b")


def test_the_flags_variables_are_those_that_the_programs_help_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    programs: Sequence[Callable[[Sequence[str]], object]] = (parse_config, parse_arguments, up.main)
    for program in programs:
        with pytest.raises(SystemExit):
            program(["--help"])
    named = re.findall(r"\[(CHAIRLIFT_\w+)\]", capsys.readouterr().out)
    assert set(named) == FLAG_VARIABLES


def test_every_variable_in_code_and_documentation_is_known() -> None:
    files = [ROOT / "README.md", ROOT / ".env.example", ROOT / "compose.yaml", *(ROOT / "docs").rglob("*.md")]
    for folder in ("deploy", "docs", "engine", "frontend", "kernels", "loadgen", "protos"):
        files += (ROOT / folder).rglob("*.py")
    named = {name for file in files for name in VARIABLE.findall(file.read_text())}
    assert len(named) > 50
    assert unknown_variables(dict.fromkeys(named, "x")) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CHAIRLIFT_MAX_NUM_SEQ", "CHAIRLIFT_MAX_NUM_SEQS"),
        ("CHAIRLIFT_MAX_SEQS", "CHAIRLIFT_MAX_NUM_SEQS"),
        ("CHAIRLIFT_APIKEY", "CHAIRLIFT_API_KEY"),
        ("CHAIRLIFT_HEARTBEAT_TIMEOUT_S", "CHAIRLIFT_HEARTBEAT_TIMEOUT"),
        ("CHAIRLIFT_PURPLE", None),
    ],
)
def test_an_unknown_variable_is_one_warning_with_the_closest_known_name(
    name: str, meant: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_unknown_variables({"CHAIRLIFT_MODEL": "m", "PATH": "/bin", name: "a-secret"})
    (record,) = caplog.records
    hint = f"; did you mean {meant}?" if meant else ""
    said = f"environment variable {name} has no effect: no program reads it{hint}"
    assert (record.levelno, record.getMessage()) == (logging.WARNING, said)


KUBERNETES = {
    "CHAIRLIFT_SERVICE_HOST": "10.0.0.1",
    "CHAIRLIFT_SERVICE_PORT": "50051",
    "CHAIRLIFT_SERVICE_PORT_GRPC": "50051",
    "CHAIRLIFT_PORT_50051_TCP": "tcp://10.0.0.1:50051",
    "CHAIRLIFT_PORT_50051_TCP_PROTO": "tcp",
    "CHAIRLIFT_FRONTEND_SERVICE_HOST": "10.0.0.2",
    "CHAIRLIFT_FRONTEND_PORT": "tcp://10.0.0.2:8000",
    "CHAIRLIFT_FRONTEND_PORT_8000_TCP_ADDR": "10.0.0.2",
}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        {"CHAIRLIFT_MAX_NUM_SEQ": ""},
        KUBERNETES,
        {"CHAIRLIFT_TARGET": "a:1", "CHAIRLIFT_LORA": "b"},
    ],
)
def test_other_environments_are_in_order(environ: Mapping[str, str]) -> None:
    assert unknown_variables(environ) == []


def test_a_misspelt_variable_beside_a_service_is_found() -> None:
    assert unknown_variables({**KUBERNETES, "CHAIRLIFT_FRONTEND_LOG": "debug"}) == ["CHAIRLIFT_FRONTEND_LOG"]
