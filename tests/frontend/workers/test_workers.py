"""Several workers on the same ports behave like one server; they are replaced, drained and ended together."""

import asyncio
import json
import os
import re
import signal
import socket
import sys

import pytest

from chairlift.service.private_folder import remove_abandoned
from frontend.api.ports import GRPC_ADVICE, reserve_port, try_ports
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.workers.supervisor import Supervisor
from tests.hang import HANG_S
from tests.support.processes import is_alive

NUM_REQUESTS = 30  # all go to the same of two workers with a probability of 2 ** -29


async def wait_gone(*pids):
    while any(is_alive(pid) for pid in pids):
        await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
async def bound():
    """Limits every wait for the processes."""
    async with asyncio.timeout(HANG_S):
        yield


async def test_all_workers_get_connections_over_grpc_and_http_and_end_when_the_parent_is_killed(start):
    frontend = await start(http=True)
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
    assert all(count > 1 for count in frontend.engine.command_counts), "one worker got all requests"
    models = await asyncio.gather(*(frontend.http("/v1/models") for _ in range(NUM_REQUESTS)))
    assert len(set(models)) == 1, "workers describe the model differently"
    frontend.process.kill()
    await wait_gone(*pids)


async def test_files_of_a_killed_parent_stay_until_its_workers_have_drained(start, environ, tmp_path):
    environ["TMPDIR"] = str(tmp_path)
    frontend = await start()
    pids = frontend.worker_pids()
    frontend.engine.pause()
    calls = [asyncio.ensure_future(frontend.generate(f"{i:02}")) for i in range(NUM_REQUESTS)]
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == NUM_REQUESTS)
    assert all(count > 1 for count in frontend.engine.command_counts), "one worker got all requests"
    frontend.process.kill()
    await wait_gone(frontend.process.pid)
    remove_abandoned(tmp_path)  # as the next parent does
    assert [path.name[:18] for path in tmp_path.iterdir()] == ["chairlift-workers-"]
    frontend.engine.resume()
    assert await asyncio.gather(*calls) == [f"{i:02}" for i in range(NUM_REQUESTS)]
    await wait_gone(*pids)
    while list(tmp_path.iterdir()):  # the last thread of a process may end after its first one, and with it the lock
        remove_abandoned(tmp_path)
        await asyncio.sleep(0.01)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_drains_all_workers_and_their_counts_are_summed(start, number):
    frontend = await start()
    frontend.engine.pause()
    calls = [asyncio.ensure_future(frontend.generate(f"{i:02}")) for i in range(NUM_REQUESTS)]
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == NUM_REQUESTS)
    assert all(count > 1 for count in frontend.engine.command_counts)
    frontend.process.send_signal(number)
    while not all(await asyncio.gather(*(frontend.refuses_calls() for _ in range(NUM_REQUESTS)))):
        pass  # until both workers drain
    frontend.engine.resume()
    assert await asyncio.gather(*calls) == [f"{i:02}" for i in range(NUM_REQUESTS)]
    status, stdout, log = await frontend.end()
    assert (status, stdout) == (0, f"drained {NUM_REQUESTS}\n")
    assert not any("Traceback" in line for line in log)


async def test_second_signal_ends_all_processes_at_once(start):
    frontend = await start()
    pids = frontend.worker_pids()
    frontend.engine.pause()
    call = asyncio.ensure_future(frontend.generate("x"))
    await frontend.engine.wait_for(lambda: frontend.engine.num_open == 1)
    frontend.process.terminate()
    while not await frontend.refuses_calls():
        pass
    frontend.process.send_signal(signal.SIGINT)
    status, stdout, log = await frontend.end()
    assert (status, stdout) == (128 + signal.SIGINT, "")
    assert [line.split(": ", 1)[1] for line in log if "second signal" in line] == ["second signal: ending at once"]
    await wait_gone(*pids)
    with pytest.raises(Exception, match="UNAVAILABLE"):
        await call


async def test_no_worker_listens_before_an_engine_is_attached(start):
    """The kernel would give it its share of the connections, whose calls it must refuse."""
    frontend = await start(http=True)
    for index in range(2):
        own = [line for line in frontend.log if f"worker {index} " in line]
        events = [re.search("is serving|listening for HTTP|listening on", line) for line in own]
        assert [event[0] for event in events if event] == ["is serving", "listening for HTTP", "listening on"]


async def test_worker_that_dies_is_replaced_while_the_others_serve(start):
    frontend = await start()
    before = frontend.worker_pids()
    os.kill(before[0], signal.SIGKILL)
    line = await frontend.logged("replacing it in")
    assert "ended: killed by SIGKILL; replacing it in 0.5 s" in line
    await frontend.engine.wait_for(lambda: frontend.engine.num_sessions == 1)
    for _ in range(5):  # the other worker gets every new connection
        assert await frontend.generate("abc") == "abc"
    await frontend.logged("listening on", 3)
    events = [line for line in frontend.log if "is serving" in line or "listening on" in line]
    assert "is serving" in events[-2], "the replacement opened its port before an engine was attached"
    assert "listening on" in events[-1]
    assert frontend.engine.num_sessions == 2
    assert len(frontend.worker_pids()) == 2
    assert before[1] in frontend.worker_pids()


async def test_port_in_use_is_one_line_and_status_2(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        frontend = await start("--port", str(port), wait=False)
        status, stdout, log = await frontend.end()
    assert (status, stdout) == (2, "")
    assert log == [
        f"chairlift-frontend: error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port"
    ]


async def test_port_of_another_server_is_in_use_unless_sharing_is_requested():
    """A second server on the port would get half of the first one's clients."""
    with reserve_port("127.0.0.1", 0, GRPC_ADVICE) as first:
        first.listen()
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use; choose another --port"):
            try_ports(FrontendConfig(port=port, http=False))
        try_ports(FrontendConfig(port=port, http=False, reuse_port=True))
        with reserve_port("127.0.0.1", port, GRPC_ADVICE) as second:
            assert second.getsockname() == first.getsockname()


async def test_one_error_names_all_ports_that_are_in_use():
    with socket.create_server(("127.0.0.1", 0)) as grpc_port, socket.create_server(("127.0.0.2", 0)) as http_port:
        ports = [grpc_port.getsockname()[1], http_port.getsockname()[1]]
        config = FrontendConfig(port=ports[0], http_host="127.0.0.2", http_port=ports[1])
        for server in (FrontendApp(config), Supervisor(config)):
            with pytest.raises(ConfigError) as caught:
                await server.start()
            await server.stop()
            assert str(caught.value) == (
                f"cannot listen on 127.0.0.1:{ports[0]}: Address already in use; choose another --port; "
                f"cannot listen on 127.0.0.2:{ports[1]}: Address already in use; choose another --http-port, "
                "or --no-http"
            )


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no sockets for both IP versions")
async def test_port_of_both_ip_versions_is_in_use_if_another_server_has_it_over_ipv4():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match="Address already in use; choose another --port"):
            reserve_port("::", port, GRPC_ADVICE)
        with pytest.raises(ConfigError, match="Address already in use; choose another --port"):
            try_ports(FrontendConfig(host="::", insecure_bind=True, port=port, http=False))


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
