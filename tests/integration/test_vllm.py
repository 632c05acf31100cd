"""The frontend in front of two real vLLM engines, one of which is killed in the middle of 64 mixed streams.

`python -m tests.support.frontend.vllm_server` makes their environment. CHAIRLIFT_VLLM_ROUNDS sets how often an engine
is killed. vLLM's greedy tokens depend on the batch where two are nearly equally probable; such answers are counted, not
failed. `-s` shows the counts.
"""

import asyncio
import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from chairlift.v1.generation_service_pb2_grpc import GenerationServiceStub
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from loadgen.processes import held_port
from tests.hang import START_HANG_S
from tests.support.frontend.vllm_server import VllmServer, vllm_python

MODEL = Path(__file__).resolve().parents[2] / "engine" / "demo" / "model"
NUM_STREAMS, NUM_TOKENS, NUM_KILL_AT = 64, 160, 40
NUM_ROUNDS = int(os.environ.get("CHAIRLIFT_VLLM_ROUNDS", "2"))
REGEX = "([a-z]+ ){60}end"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        vllm_python() is None, reason="no vLLM: python -m tests.support.frontend.vllm_server makes its environment"
    ),
    pytest.mark.timeout(3600),
]


def request(index: int) -> pb.StreamGenerateRequest:
    """One of five kinds in turn: greedy, with log-probabilities, sampled with penalties, sampled, constrained."""
    spec = pb.GenerationSpec(
        text=f"Once upon a time, number {index}",
        sampling=pb.SamplingOptions(temperature=0.0, seed=index),
        stop=pb.StopOptions(max_tokens=NUM_TOKENS, ignore_end_token=True),
        output=pb.OutputOptions(token_ids=True),
    )
    match index % 5:
        case 1:
            spec.output.top_logprobs = 2
        case 2:
            spec.sampling.temperature, spec.sampling.frequency_penalty = 0.8, 0.2
        case 3:
            spec.sampling.temperature, spec.sampling.top_p = 1.0, 0.9
        case 4:
            spec.stop.ignore_end_token = False
            spec.structured_output.regex = REGEX
    return pb.StreamGenerateRequest(spec=spec)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    num_logprobs: int = 0
    finished: pb.Finished | None = None
    error: str = ""


async def read(stub: Any, index: int, answer: Answer) -> Answer:
    """Reads one stream; every token must come once and in order."""
    try:
        async for message in stub.StreamGenerate(request(index)):
            if message.HasField("chunk"):
                assert message.chunk.first_token_index == len(answer.token_ids), "a token is lost or comes twice"
                answer.token_ids += message.chunk.token_ids
                answer.text += message.chunk.text
                answer.num_logprobs += len(message.chunk.logprobs.chosen)
            if message.HasField("finished"):
                assert answer.finished is None, "two ends"
                answer.finished = message.finished
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    return answer


def check(index: int, answer: Answer) -> None:
    """The answer is whole."""
    assert not answer.error, answer.error
    assert answer.finished is not None
    assert answer.finished.usage.num_output_tokens == len(answer.token_ids)
    if index % 5 == 4:
        assert re.fullmatch(REGEX, answer.text) or len(answer.token_ids) == NUM_TOKENS
        assert re.fullmatch("[a-z ]*", answer.text)
    else:
        assert len(answer.token_ids) == NUM_TOKENS
    assert answer.num_logprobs == (NUM_TOKENS if index % 5 == 1 else 0)


async def until(condition: Any, servers: list[VllmServer]) -> None:
    async with asyncio.timeout(START_HANG_S):
        while not condition():
            assert not any(server.has_exited for server in servers), "vLLM has ended: see its log"
            await asyncio.sleep(0.05)


async def test_64_streams_survive_the_kill_of_one_of_two_engines(tmp_path: Path) -> None:
    python = vllm_python()
    assert python is not None
    with held_port() as first, held_port() as second:
        ports = [first, second]
    with (
        VllmServer(python, MODEL, ports[0], tmp_path / "vllm-0.log") as one,
        VllmServer(python, MODEL, ports[1], tmp_path / "vllm-1.log") as two,
    ):
        servers = [one, two]
        config = FrontendConfig(
            engine=tuple(server.address for server in servers),
            port=0,
            http=False,
            heartbeat_timeout_s=30,  # vLLM compiles kernels on its first requests, on the cores that answer polls
            failover_timeout_s=300,
        )
        app = FrontendApp(config)
        await app.start()
        try:
            await until(lambda: len(app.engines._usable) == 2, servers)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{app.port}") as channel:
                stub = GenerationServiceStub(channel)
                calm = await asyncio.gather(*(read(stub, index, Answer()) for index in range(NUM_STREAMS)))
                for index, answer in enumerate(calm):
                    check(index, answer)
                for number in range(NUM_ROUNDS):
                    await _round(app, stub, servers, number, calm)
        finally:
            await app.stop()


async def _round(app: FrontendApp, stub: Any, servers: list[VllmServer], number: int, calm: list[Answer]) -> None:
    """Kills one engine once the streams have a quarter of their tokens, and starts it again."""
    server = servers[number % 2]
    await until(lambda: len(app.engines._usable) == 2, servers)
    answers = [Answer() for _ in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(read(stub, index, answer)) for index, answer in enumerate(answers)]
    await until(lambda: sum(len(answer.token_ids) for answer in answers) > NUM_STREAMS * NUM_KILL_AT, servers)
    server.kill()
    killed_at_s = time.monotonic()
    num_moved_from = sum(answer.finished is None for answer in answers)
    await asyncio.gather(*tasks)
    for index, answer in enumerate(answers):
        check(index, answer)
    moved = [answer for answer in answers if answer.finished and answer.finished.timing.HasField("moved")]
    moved = [answer for answer in moved if answer.finished and answer.finished.timing.moved.ToMicroseconds()]
    assert moved, "the engine had no stream"
    greedy = [index for index in range(NUM_STREAMS) if index % 5 < 2]
    num_equal = sum(answers[index].token_ids == calm[index].token_ids for index in greedy)
    print(  # noqa: T201 - what `-s` is for
        f"round {number + 1}: {num_moved_from} open at the kill, {len(moved)} moved, all {NUM_STREAMS} whole "
        f"{time.monotonic() - killed_at_s:.1f} s later; {num_equal} of {len(greedy)} greedy answers as undisturbed"
    )
    server.start()
