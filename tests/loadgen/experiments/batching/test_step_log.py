"""Reading step logs: whole, in parts, and broken."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadgen.errors import ResultError
from loadgen.experiments.batching.step_log import read_steps
from loadgen.step_log import Usage


def line(**fields: Any) -> str:
    record = {
        "step": 1,
        "t_ms": 12.5,
        "schedule_ms": 0.1,
        "execute_ms": 2.0,
        "update_ms": 0.4,
        "scheduled": {"7": 1, "9": 32},
        "num_tokens": 33,
        "running": 2,
        "waiting": 3,
        "finished": {"7": "MAX_TOKENS"},
        "usage": {"7": [32, 16, 5]},
        "preempted": [4],
        "blocks_used": 5,
        "blocks_free": 6,
        **fields,
    }
    return json.dumps(record) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


def test_a_line_becomes_a_step(log: Path) -> None:
    log.write_text(line())
    (step,), end = read_steps(log)
    assert end == log.stat().st_size
    assert (step.started_ms, step.busy_ms, step.num_tokens) == (12.5, pytest.approx(2.5), 33)
    assert (step.rows, step.finished) == ({7: 1, 9: 32}, {7: Usage(prompt=32, cached=16, output=5)})
    assert (step.preempted, step.waiting, step.running) == ((4,), 3, 2)


def test_turns_without_rows_are_left_out(log: Path) -> None:
    log.write_text(line() + line(scheduled={}, num_tokens=0) + line())
    assert len(read_steps(log).steps) == 2


def test_reading_goes_on_where_it_ended_and_leaves_a_line_that_is_being_written(log: Path) -> None:
    log.write_text(line(t_ms=1.0) + line(t_ms=2.0) + line(t_ms=3.0)[:40])
    first = read_steps(log)
    assert [step.started_ms for step in first.steps] == [1.0, 2.0]
    assert read_steps(log, first.end) == ([], first.end)
    log.write_text(line(t_ms=1.0) + line(t_ms=2.0) + line(t_ms=3.0))
    assert [step.started_ms for step in read_steps(log, first.end).steps] == [3.0]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not json\n", "Expecting value"),
        ("[1, 2]\n", "has no attribute"),
        (line().replace('"t_ms": 12.5, ', ""), "no field 't_ms'"),
        (line(scheduled={"x": 1}), "invalid literal"),
        (line(scheduled={"7": 0}), "a row without tokens"),
        (line(usage={"7": [1, 2]}), "missing 1 required positional argument"),
        (line(usage={}), "`usage` and `finished` name different requests"),
        (line(t_ms=None), "float"),
        (line(dropped=12), "could not write 12 steps"),
    ],
)
def test_a_malformed_line_is_named(log: Path, bad: str, message: str) -> None:
    log.write_text(line() + bad + line())
    with pytest.raises(ResultError, match=f"line 2 after byte 0: .*{message}"):
        read_steps(log)


def test_a_missing_file_is_named(log: Path) -> None:
    with pytest.raises(ResultError, match=r"steps\.jsonl: No such file"):
        read_steps(log)
