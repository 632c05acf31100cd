"""Fuzzes the gRPC API: random messages, bytes, metadata, cancellations and deadlines.

Each call gets a status that its client caused, and valid streams beside it are complete.
"""

import asyncio
import contextlib
from collections import Counter
from typing import NamedTuple

import grpc
import pytest
from grpc._cython.cygrpc import ExecuteBatchError

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fuzz import bend, garble, wire

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CODES = grpc.StatusCode
FAIR = {
    CODES.OK,
    CODES.INVALID_ARGUMENT,
    CODES.NOT_FOUND,
    CODES.RESOURCE_EXHAUSTED,
    CODES.DEADLINE_EXCEEDED,
    CODES.CANCELLED,
    CODES.UNIMPLEMENTED,
}
SERVICE = "/chairlift.v1.GenerationService/"
TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
SPECS = [
    pb.GenerationSpec(text="abc", stop=pb.StopOptions(max_tokens=4)),
    pb.GenerationSpec(text="xyz" * 20, num_answers=3, output=pb.OutputOptions(token_ids=True, top_logprobs=2)),
    pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.SamplingOptions(seed=5, logit_bias={3: 1.5})),
    pb.GenerationSpec(
        chat=pb.ChatPrompt(
            messages=[
                pb.ChatMessage(role="user", content="hi"),
                pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments_json="{}")]),
                pb.ChatMessage(role="tool", content="x", tool_call_id="1"),
            ],
            tools_json=[TOOL],
        ),
        stop=pb.StopOptions(max_tokens=9, stop_texts=["i"], stop_token_ids=[7]),
    ),
]
COUNTS = [pb.CountTokensRequest(text="abc"), pb.CountTokensRequest(chat=SPECS[3].chat, return_token_ids=True)]
METADATA = [
    *(("traceparent", "00-0"), ("authorization", "Bearer x"), ("x-" + "k" * 200, "v"), ("x-long", "v" * 5000)),
    *(
        ("x-bin", bytes(range(256))),
        ("grpc-previous-rpc-attempts", "999"),
        ("content-language", ""),
        ("x-huge", "v" * 20_000),
    ),
]


class Case(NamedTuple):
    method: str
    messages: list[bytes]
    metadata: list[tuple[str, str | bytes]]
    timeout_s: float | None
    read_before_cancel: int | None
    compression: grpc.Compression | None


def draw(rng):
    name = rng.choice(["Generate", "StreamGenerate", "StreamGenerate", "StreamGenerate", "CountTokens", "GetModel"])
    match name:
        case "CountTokens":
            message = pb.CountTokensRequest.FromString(rng.choice(COUNTS).SerializeToString())
        case "GetModel":
            message = pb.GetModelRequest(model="fake")
        case _:
            message = getattr(pb, f"{name}Request")(spec=rng.choice(SPECS))
    bent = message.spec if hasattr(message, "spec") and rng.random() < 0.95 else message
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        bend(rng, bent)
    data = wire(message)
    if rng.random() < 0.15:
        data = garble(rng, data)
    method = SERVICE + name
    if rng.random() < 0.03:
        method = rng.choice(
            [
                SERVICE + "NoSuchMethod",
                "/x/y",
                "/grpc.health.v1.Health/Check",
                "/grpc.health.v1.Health/List",
                "/chairlift.engine.v1.EngineService/Attach",
            ]
        )
    return Case(
        method=method,
        messages=[data] * rng.choice((1,) * 30 + (0, 2)),
        metadata=rng.sample(METADATA, 1) if rng.random() < 0.1 else [],
        timeout_s=rng.choice((0.001, 0.003, 0.01)) if rng.random() < 0.1 else None,
        read_before_cancel=rng.choice((0, 0, 1, 2, 3)) if rng.random() < 0.15 else None,
        compression=rng.choice((grpc.Compression.Gzip, grpc.Compression.Deflate)) if rng.random() < 0.05 else None,
    )


async def run_case(channel, case):
    """Runs a case; returns the status and the messages."""
    options = {"timeout": case.timeout_s, "metadata": case.metadata, "compression": case.compression}
    answers = []
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, ExecuteBatchError):
        if len(case.messages) == 1:
            call = channel.unary_stream(case.method)(case.messages[0], **options)
        else:
            call = channel.stream_stream(case.method)(**options)
            for data in case.messages:
                await call.write(data)
            await call.done_writing()
        while len(answers) != case.read_before_cancel and (answer := await call.read()) is not grpc.aio.EOF:
            answers.append(answer)
        if len(answers) == case.read_before_cancel:
            call.cancel()
    code, details = await call.code(), await call.details()
    if len(case.messages) != 1 and details == "Internal error from Core":
        code = CODES.CANCELLED  # the client's status if the call ends while it still sends
    return code, details, answers


def check_answer(case, answers):
    """Checks that successful answers are complete."""
    if case.method == SERVICE + "StreamGenerate":
        events = [pb.StreamGenerateResponse.FromString(answer) for answer in answers]
        kinds = [event.WhichOneof("event") for event in events]
        assert (kinds[0], kinds[-1], kinds.count("started")) == ("started", "finished", 1)
        spec = pb.StreamGenerateRequest.FromString(case.messages[0]).spec
        assert kinds.count("finished") == (spec.num_answers or 1)
        next_index = Counter()
        for event in events:
            if event.HasField("chunk"):
                assert event.chunk.first_token_index == next_index[event.chunk.answer_index]
                next_index[event.chunk.answer_index] += event.chunk.num_tokens
    else:
        assert len(answers) == 1


async def test_invalid_calls_get_a_client_error_and_do_not_affect_others(pair, run_cases):
    channel = pair.channel()
    statuses = Counter()

    async def one(rng):
        case = draw(rng)
        code, details, answers = await run_case(channel, case)
        statuses[code] += 1
        assert code in FAIR, (case, code, details)
        if code is CODES.OK:
            check_answer(case, answers)

    num_cases = await run_cases(one, 0.5)
    assert sum(statuses.values()) == num_cases
    if num_cases >= 1000:
        assert statuses[CODES.OK] > num_cases // 8
        assert statuses[CODES.INVALID_ARGUMENT] > num_cases // 8
        assert statuses.keys() == FAIR, statuses


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def test_random_bytes_on_a_connection_do_not_affect_others(pair, run_cases):
    async def one(rng):
        frames = b"".join(
            rng.randint(0, 40).to_bytes(3, "big") + rng.randbytes(6) + rng.randbytes(rng.randint(0, 40))
            for _ in range(5)
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.port)
        with contextlib.suppress(ConnectionError):
            writer.write(rng.choice((PREFACE + frames, PREFACE + b"\0\0\0\4\0\0\0\0\0" + frames, frames, PREFACE[:9])))
            writer.write_eof()
            await reader.read()
        writer.close()

    await run_cases(one, 0.01)
