"""Log lines as JSON, one object each, whatever it is that speaks."""

import json
import subprocess
import sys

import pytest

from engine.testing_process import ENVIRONMENT

SPEAKERS = """
import logging, sys, threading, warnings
from engine.logs import log_to_stderr
log_to_stderr("info", "json", rank=1)
logging.getLogger("engine.step_loop").info("step %d", 3, extra={"request_id": "r-1"})
logging.getLogger("engine.step_loop").debug("not at this level")
logging.getLogger("httpx").info("noise of a library")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("engine").exception("failed")
warnings.warn("old", DeprecationWarning)
thread = threading.Thread(target=lambda: {}["missing"])
thread.start()
thread.join()
raise RuntimeError("the end")
"""


@pytest.fixture(scope="module")
def lines() -> list[dict[str, object]]:
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", SPEAKERS], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert result.returncode == 1
    return [json.loads(line) for line in result.stderr.splitlines()]


def test_fields_have_their_names(lines: list[dict[str, object]]) -> None:
    first = dict(lines[0])
    assert str(first.pop("ts")).endswith("+00:00")
    assert first == {
        "level": "INFO", "logger": "engine.step_loop", "msg": "step 3", "program": "chairlift-engine", "rank": 1,
        "request_id": "r-1",
    }  # fmt: skip


def test_an_exception_is_one_line_whoever_raises_it(lines: list[dict[str, object]]) -> None:
    said = [(line["level"], str(line["exc_info"]).splitlines()[-1]) for line in lines if "exc_info" in line]
    assert said == [
        ("ERROR", "ZeroDivisionError: division by zero"),
        ("CRITICAL", "KeyError: 'missing'"),
        ("CRITICAL", "RuntimeError: the end"),
    ]


def test_warnings_of_python_are_lines_too(lines: list[dict[str, object]]) -> None:
    assert [line["logger"] for line in lines].count("py.warnings") == 1
    assert len(lines) == 5
