"""`python -m frontend` as a process: start, errors and signals."""

import asyncio
import os
import signal
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.api.grpc.server import SERVICE_NAME
from tests.support.frontend.fake_engine import FakeEngine


async def start_process(*flags):
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "frontend",
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


async def read_port(process):
    async for line in process.stderr:
        if b"listening on" in line:
            return int(line.split(b"listening on ")[1].split(b",")[0].rpartition(b":")[2])
    raise AssertionError("the process ended without listening")


@pytest.mark.sampled
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("flag", ["--uvloop", "--no-uvloop"])
async def test_signal_drains_and_the_process_ends_with_status_0(number, flag):
    engine = FakeEngine()
    await engine.start()
    process = await start_process("--port", "0", "--no-http", "--engine", engine.address, flag)
    port = await read_port(process)
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == max(5, os.getpriority(os.PRIO_PROCESS, 0))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = GenerationServiceStub(channel)
        await engine.wait_for(lambda: engine.num_sessions == 1)
        watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()
        engine.pause()
        calls = [
            asyncio.ensure_future(stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text=text))))
            for text in ("abc", "def")
        ]
        await engine.wait_for(lambda: engine.num_open == 2)
        process.send_signal(number)
        engine.resume()
        assert [answer.text for answer in await asyncio.gather(*calls)] == ["abc", "def"]
        stdout, stderr = await process.communicate()
    # A call that finishes before the signal is handled is served, but not counted as drained.
    assert stdout in (b"drained 2\n", b"drained 1\n", b"drained 0\n")
    assert (process.returncode, b"Traceback" in stderr) == (0, False), stderr.decode()
    await engine.kill()


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_end_of_what_reads_stdout_is_no_failure(workers):
    process = await start_process("--port", "0", "--no-http", "--workers", workers)
    await read_port(process)
    process._transport.get_pipe_transport(1).close()  # as `| tee` that Ctrl-C has ended
    process.send_signal(signal.SIGINT)
    stderr = await process.stderr.read()
    assert (await process.wait(), b"Traceback" in stderr) == (0, False), stderr.decode()


async def test_misspelt_variable_is_a_warning(monkeypatch):
    monkeypatch.setenv("CHAIRLIFT_TOKEN_WINDOWS", "7")
    process = await start_process("--port", "0", "--no-http")
    lines = [await process.stderr.readline()]
    process.kill()
    await process.communicate()
    assert b"WARNING" in lines[0]
    assert (
        b"CHAIRLIFT_TOKEN_WINDOWS has no effect: no program reads it; did you mean CHAIRLIFT_TOKEN_WINDOW?" in lines[0]
    )


async def test_port_in_use_is_one_line_and_status_2(pair):
    process = await start_process("--port", str(pair.app.port), "--no-http")
    stdout, stderr = await process.communicate()
    assert (process.returncode, stdout) == (2, b"")
    assert stderr.decode().splitlines() == [
        f"chairlift-frontend: error: cannot listen on 127.0.0.1:{pair.app.port}: Address already in use; "
        "choose another --port"
    ]
