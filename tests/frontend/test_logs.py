"""Log lines as JSON, one object each, from all that a frontend consists of."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

SPEAKERS = """
import asyncio, logging
from frontend.logs import complain, log_to_stderr
log_to_stderr("warning", "json", worker=2)
for name in ("uvicorn.error", "grpc._cython.cygrpc", "opentelemetry.sdk.trace.export"):
    logging.getLogger(name).error("trouble")
logging.getLogger("frontend").info("not at this level")
complain("chairlift-frontend", ValueError("--port is taken"), "json")
async def fail():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
asyncio.run(fail())
raise RuntimeError("the end")
"""


def test_everybody_speaks_json_and_says_which_worker_it_is():
    result = subprocess.run([sys.executable, "-c", SPEAKERS], capture_output=True, text=True, env=ENVIRONMENT)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("uvicorn.error", "ERROR"),
        ("grpc._cython.cygrpc", "ERROR"),
        ("opentelemetry.sdk.trace.export", "ERROR"),
        ("frontend", "CRITICAL"),
        ("asyncio", "ERROR"),
        ("frontend", "CRITICAL"),
    ]
    assert {(line["program"], line["worker"]) for line in lines} == {("chairlift-frontend", 2)}
    assert lines[3]["msg"] == "--port is taken"
    assert "ZeroDivisionError" in lines[4]["exc_info"]


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_a_frontend_says_nothing_that_is_not_json(pair, workers):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--port", "0", "--http-port", "0", "--workers", workers),
        *("--engine", pair.engine.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "CHAIRLIFT_LOG_FORMAT": "json"},
    )
    lines = []
    while len([line for line in lines if "attached" in line["msg"]]) < int(workers):
        lines.append(json.loads(await process.stderr.readline()))
    process.send_signal(signal.SIGTERM)
    said, rest = await process.communicate()
    assert said == b""  # a container's log holds both
    lines += [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 0
    assert {line.get("worker") for line in lines if "attached" in line["msg"]} == ({None} if workers == "1" else {0, 1})
