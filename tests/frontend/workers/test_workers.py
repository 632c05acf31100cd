"""Several processes on one port look like one server: served, replaced, drained and ended together."""

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

NUM_REQUESTS = 40  # that all go to one of two workers has a chance of 2 ** -39


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def wait_gone(*pids):
    while any(is_running(pid) for pid in pids):
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
async def bound():
    """Every wait for the processes has a limit."""
    async with asyncio.timeout(60):
        yield


async def test_connections_are_dealt_out_through_both_doors_and_all_are_served(start):
    frontend = await start()
    assert frontend.engine.num_sessions == 2
    pids = frontend.worker_pids()
    assert len(pids) == 2
    assert await asyncio.gather(*(frontend.generate(f"{i:02}") for i in range(NUM_REQUESTS))) == [
        f"{i:02}" for i in range(NUM_REQUESTS)
    ]
    body = json.dumps({"prompt": "abc"}).encode()
    answers = await asyncio.gather(*(frontend.http("/v1/completions", body) for _ in range(NUM_REQUESTS)))
    assert {json.loads(answer)["choices"][0]["text"] for answer in answers} == {"abc"}
    assert len(frontend.engine.submissions) == 2 * NUM_REQUESTS
    assert all(count > 1 for count in frontend.engine.command_counts), "one worker has got everything"


async def test_every_worker_describes_the_same_server(start):
    frontend = await start()
    models = await asyncio.gather(*(frontend.http("/v1/models") for _ in range(NUM_REQUESTS)))
    assert len(set(models)) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_all_workers_and_tells_the_sum(start, number):
    frontend = await start()
    frontend.engine.pause()
    calls = [asyncio.ensure_future(frontend.generate(f"{i:02}")) for i in range(NUM_REQUESTS)]
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == NUM_REQUESTS)
    assert all(count > 1 for count in frontend.engine.command_counts)
    frontend.process.send_signal(number)
    while True:  # until both refuse what is new
        refused = await asyncio.gather(*(_is_refused(frontend) for _ in range(NUM_REQUESTS)))
        if all(refused):
            break
    frontend.engine.resume()
    assert await asyncio.gather(*calls) == [f"{i:02}" for i in range(NUM_REQUESTS)]
    status, stdout, log = await frontend.end()
    assert (status, stdout) == (0, f"drained {NUM_REQUESTS}\n")
    assert not any("Traceback" in line for line in log)


async def _is_refused(frontend):
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.ports["http"])
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return b" 503 " in answer.partition(b"\r\n")[0]


async def test_what_is_cut_off_is_not_counted_as_drained(start):
    frontend = await start("--shutdown-timeout", "0.2")
    frontend.engine.pause()
    calls = [asyncio.ensure_future(frontend.generate("x")) for _ in range(4)]
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == 4)
    frontend.process.terminate()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, Exception) for result in results)
    assert (await frontend.end())[:2] == (0, "drained 0\n")


async def test_second_signal_ends_everything_at_once(start):
    frontend = await start()
    pids = frontend.worker_pids()
    frontend.engine.pause()
    call = asyncio.ensure_future(frontend.generate("x"))
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == 1)
    frontend.process.terminate()
    while not await _is_refused(frontend):
        pass
    frontend.process.send_signal(signal.SIGINT)
    status, stdout, log = await frontend.end()
    assert (status, stdout) == (128 + signal.SIGINT, "")
    assert [line.split(": ", 1)[1] for line in log if "second signal" in line] == ["second signal: ending at once"]
    await wait_gone(*pids)
    with pytest.raises(Exception, match="UNAVAILABLE"):
        await call


async def test_worker_that_dies_is_replaced_and_others_go_on(start):
    frontend = await start()
    before = frontend.worker_pids()
    os.kill(before[0], signal.SIGKILL)
    line = await frontend.logged("replacing it in")
    assert "ended: killed by SIGKILL; replacing it in 0.5 s" in line
    await frontend.engine.wait_for(lambda: frontend.engine.num_sessions == 1)
    for _ in range(5):  # the one that is left takes every new connection
        assert await frontend.generate("abc") == "abc"
    await frontend.engine.wait_for(lambda: frontend.engine.num_sessions == 2)
    await frontend.logged("is serving", 3)
    assert len(frontend.worker_pids()) == 2
    assert before[1] in frontend.worker_pids()
    frontend.process.terminate()
    assert (await frontend.end())[:2] == (0, "drained 0\n")


async def test_replacement_opens_its_port_only_when_it_can_serve(start):
    frontend = await start()
    os.kill(frontend.worker_pids()[0], signal.SIGKILL)
    await frontend.logged("is serving", 3)
    await frontend.logged("listening on", 3)
    words = [line for line in frontend.log if "is serving" in line or "listening on" in line]
    assert "is serving" in words[-2]
    assert "listening on" in words[-1]


async def test_workers_end_when_the_parent_is_killed(start):
    frontend = await start()
    pids = frontend.worker_pids()
    frontend.process.kill()
    await wait_gone(*pids)


async def test_port_in_use_is_one_line_and_status_2(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        frontend = await start("--port", str(port), wait=False)
        status, stdout, log = await frontend.end()
    assert (status, stdout) == (2, "")
    assert log == [
        f"chairlift-frontend: error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
    ]


async def test_port_of_other_workers_is_in_use_unless_sharing_it_is_asked_for(start):
    first = await start()
    port = str(first.ports["grpc"])
    second = await start("--port", port, "--no-http", wait=False)
    status, _, log = await second.end()
    assert status == 2
    assert "Address already in use" in log[0]
    sharing = await start("--port", port, "--no-http", "--reuse-port")
    assert sharing.engine.num_sessions == 2


async def test_flag_that_only_a_worker_can_check_is_one_line_and_status_2(start, tmp_path):
    frontend = await start("--tokenizer", str(tmp_path), wait=False)
    status, stdout, log = await frontend.end()
    assert (status, stdout) == (2, "")
    (line,) = log
    assert line.startswith(f"chairlift-frontend: error: --tokenizer {tmp_path}: the model has no tokenizer.json")


async def test_parent_imports_neither_grpc_nor_the_http_server(environ):
    code = "import sys, frontend.__main__; sys.exit(bool({'grpc', 'uvicorn', 'tokenizers'} & set(sys.modules)))"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environ)
    assert await process.wait() == 0
