"""What a frontend logs: lines for people that no client can forge, or JSON, one object a line."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import aiohttp
import pytest

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

FORGED = "\r\n2026-01-01 00:00:00.000 INFO frontend: forged\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\x00\x7f"
"""What a client may send to write lines of its own, to move the cursor, or to turn a line around."""

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ [\w.]+: .*")

TEXT_SPEAKER = """
import logging, sys
from frontend.logs import complain, log_to_stderr
log_to_stderr("info", "text")
_log = logging.getLogger("frontend")
forged = sys.argv[1].encode().decode("unicode_escape")
_log.info("model %s, request %s", forged, "plain – text")
try:
    raise ValueError(forged)
except ValueError:
    _log.exception("failed")
complain("chairlift-frontend", ValueError(forged), "text")
"""


def goaway(text: bytes) -> bytes:
    """What an HTTP/2 client sends that leaves at once and says why: preface, SETTINGS, GOAWAY."""

    def frame(kind: int, payload: bytes) -> bytes:
        return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload

    settings, gone = frame(4, b""), frame(7, bytes(4) + (2).to_bytes(4, "big") + text)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + gone


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
    assert lines[1].endswith("ERROR frontend: failed")
    assert lines[2:] == [f"chairlift-frontend: error: {shown}"]
    assert "  ValueError: " in result.stderr


async def test_no_client_writes_into_the_log(pair):
    """Before it has shown a key, by what gRPC's core would print, and after, by what requests say of themselves."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--port", "0", "--http-port", "0", "--log-requests", "--log-prompts"),
        *("--engine", pair.engine.address, "--log-level", "debug"),
        stderr=subprocess.PIPE,
        env={name: value for name, value in ENVIRONMENT.items() if not name.startswith("GRPC_")},
    )
    said = ""
    try:
        while "attached" not in said:
            said += (await process.stderr.readline()).decode()
        http_port = re.search(r"listening for HTTP on port (\d+)", said)[1]
        port = re.search(r"listening on \S+:(\d+)", said)[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.write(goaway(FORGED.encode()))
        writer.write_eof()
        await reader.read()  # until the server has taken it, and closes
        writer.close()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{http_port}") as session:
            for body in ({"prompt": FORGED}, {"prompt": "a", "model": FORGED}, {"prompt": "a", "request_id": FORGED}):
                async with session.post("/v1/completions", json={**body, "max_tokens": 2}) as response:
                    await response.read()
            async with session.get(
                "/" + FORGED.encode("unicode_escape").decode(), headers={"x-request-id": "\x9b"}
            ) as r:
                await r.read()
        process.send_signal(signal.SIGTERM)
        said += (await process.communicate())[1].decode()
    finally:
        if process.returncode is None:
            process.kill()
    assert all(char.isprintable() or char == "\n" for char in said)
    assert [line for line in said.splitlines() if not LINE.fullmatch(line)] == []
    assert r"\x1b[2J" in said  # of the prompt


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
