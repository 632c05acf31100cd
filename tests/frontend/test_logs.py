"""The log of a running frontend: clients cannot forge lines, and with `--log-format json` every line is JSON."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys

import aiohttp
import pytest

from tests.support.goaway import goaway

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

FORGED = "\r\n2026-01-01 00:00:00.000 INFO frontend: forged\n\x1b[2J\x1b]0;title\x07\x9b31m\u202e\u2028\x00\x7f"
"""Text of a client that would add a log line, move the cursor, or reverse a line."""

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [A-Z]+ [\w.]+: .*")


async def test_clients_cannot_forge_log_lines(pair):
    """Neither through gRPC's own output, which needs no key, nor through logged fields of requests."""
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
        await reader.read()  # until the server closes the connection
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
    assert r"\x1b[2J" in said  # from the prompt


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_every_line_is_json(pair, workers):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "frontend", "--port", "0", "--no-http", "--workers", workers),
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
    assert said == b""  # a container's log contains both streams
    lines += [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 0
    assert {line.get("worker") for line in lines if "attached" in line["msg"]} == ({None} if workers == "1" else {0, 1})
