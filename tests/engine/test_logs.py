"""Lines for people that no peer can forge, or JSON, one object a line, whatever it is that speaks."""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.testing_process import ENVIRONMENT, engine_process

FORGED = "\n2026-01-01 00:00:00.000 INFO engine: forged\n\x1b[2J\x9b31m\u2028"

TEXT_SPEAKER = """
import logging, sys
from engine.logs import log_to_stderr
log_to_stderr("info", "text", rank=1)
forged = sys.argv[1].encode().decode("unicode_escape")
logging.getLogger("engine").info("frontend %s attached", forged)
try:
    raise ValueError(forged)
except ValueError:
    logging.getLogger("engine").exception("failed")
"""


def goaway(text: bytes) -> bytes:
    """What an HTTP/2 client sends that leaves at once and says why: preface, SETTINGS, GOAWAY."""

    def frame(kind: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload

    settings, gone = frame(4, b""), frame(7, bytes(4) + (2).to_bytes(4, "big") + text)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + gone


def test_what_a_peer_chose_is_escaped_in_lines_for_people() -> None:
    argument = FORGED.encode("unicode_escape").decode()
    result = subprocess.run(
        [sys.executable, "-c", TEXT_SPEAKER, argument], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    assert all(char.isprintable() or char == "\n" for char in result.stderr)
    first, failed = (line for line in result.stderr.splitlines() if not line.startswith("  "))
    shown = r"\n2026-01-01 00:00:00.000 INFO engine: forged\n\x1b[2J\x9b31m\u2028"
    assert first.endswith(f"INFO rank 1 engine: frontend {shown} attached")
    assert failed.endswith("ERROR rank 1 engine: failed")
    assert "  ValueError: " in result.stderr


async def test_no_peer_writes_into_the_log(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ENVIRONMENT, "GRPC_VERBOSITY", raising=False)
    model_dir = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), model_dir)
    async with engine_process(tmp_path, "--model", model_dir, "--load-format", "dummy") as process:
        await process.said("listening on")
        reader, writer = await asyncio.open_unix_connection(process.address.removeprefix("unix:"))
        writer.write(goaway(FORGED.encode()))
        writer.write_eof()
        await reader.read()  # until the server has taken it, and closes
        writer.close()
        process.signal(signal.SIGTERM)
        await process.ended()
    said = "".join(process.lines)
    assert "forged" not in said
    assert "\x1b" not in said


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
