"""Log formats: lines for people that no peer can forge, or JSON, one object a line."""

import json
import os
import subprocess
import sys

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

FORGED = "\r\n2026-01-01 00:00:00.000 INFO frontend: forged\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\x00\x7f"
"""What a client may send to write lines of its own, to move the cursor, or to turn a line around."""

TEXT_SPEAKER = """
import logging, sys
from chairlift.service.logs import log_to_stderr, report_error
log_to_stderr("chairlift-frontend", "info", "text", worker=1)
_log = logging.getLogger("frontend")
forged = sys.argv[1].encode().decode("unicode_escape")
_log.info("model %s, request %s", forged, "plain – text")
try:
    raise ValueError(forged)
except ValueError:
    _log.exception("failed")
report_error("chairlift-frontend", ValueError(forged), "text")
"""


def test_what_a_client_chose_is_escaped_in_lines_for_people():
    argument = FORGED.encode("unicode_escape").decode()
    result = subprocess.run(
        [sys.executable, "-c", TEXT_SPEAKER, argument], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert result.returncode == 0, result.stderr
    assert all(char.isprintable() or char == "\n" for char in result.stderr)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("  ")]  # a traceback is indented
    shown = r"\r\n2026-01-01 00:00:00.000 INFO frontend: forged\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\x00\x7f"
    assert lines[0].endswith(f"model {shown}, request plain – text")
    assert lines[1].endswith("ERROR worker 1 frontend: failed")
    assert lines[2:] == [f"chairlift-frontend: error: {shown}"]
    assert "  ValueError: " in result.stderr


SPEAKERS = """
import asyncio, logging, threading, warnings
from chairlift.service.logs import log_to_stderr, report_error
log_to_stderr("chairlift-engine", "info", "json", rank=1)
logging.getLogger("engine.step_loop").info("step %d", 3, extra={"request_id": "r-1"})
logging.getLogger("engine.step_loop").debug("not at this level")
logging.getLogger("httpx").info("noise of a library")
for name in ("uvicorn.error", "grpc._cython.cygrpc", "opentelemetry.sdk.trace.export"):
    logging.getLogger(name).error("trouble")
report_error("chairlift-engine", ValueError("--port is taken"), "json")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("engine").exception("failed")
warnings.warn("old", DeprecationWarning)
thread = threading.Thread(target=lambda: {}["missing"])
thread.start()
thread.join()
async def fail():
    asyncio.get_running_loop().call_soon(lambda: [][0])
    await asyncio.sleep(0)
asyncio.run(fail())
raise RuntimeError("the end")
"""


def test_json_has_one_object_per_line_with_its_fields_whatever_logs_it():
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", SPEAKERS], capture_output=True, text=True, env=ENVIRONMENT
    )
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert all(line.pop("ts").endswith("+00:00") for line in lines)
    assert lines[0] == {
        "level": "INFO", "logger": "engine.step_loop", "msg": "step 3", "program": "chairlift-engine", "rank": 1,
        "request_id": "r-1",
    }  # fmt: skip
    assert {(line["program"], line["rank"]) for line in lines} == {("chairlift-engine", 1)}
    assert [(line["logger"], line["level"]) for line in lines[1:]] == [
        ("uvicorn.error", "ERROR"),
        ("grpc._cython.cygrpc", "ERROR"),
        ("opentelemetry.sdk.trace.export", "ERROR"),
        ("chairlift", "CRITICAL"),
        ("engine", "ERROR"),
        ("py.warnings", "WARNING"),
        ("chairlift", "CRITICAL"),
        ("asyncio", "ERROR"),
        ("chairlift", "CRITICAL"),
    ]
    assert lines[4]["msg"] == "--port is taken"
    assert [line["exc_info"].splitlines()[-1] for line in lines if "exc_info" in line] == [
        "ZeroDivisionError: division by zero",
        "KeyError: 'missing'",
        "IndexError: list index out of range",
        "RuntimeError: the end",
    ]
