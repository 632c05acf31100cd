"""What only gRPC servers do."""

import asyncio
import collections
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.grpc.status import error_status
from frontend.errors import QueueFull, TargetsInfeasible
from loadgen.errors import TargetError
from loadgen.target.base import PlannedRequest, RequestFailedError, RequestRefusedError, RequestTargets, TargetSpec
from loadgen.target.chairlift_grpc import ChairliftTarget
from loadgen.target.probe import Tally

Stream = Callable[[bytes, Any], AsyncIterator[bytes]]
REQUEST = PlannedRequest(0, None, "text", 7)


@pytest.fixture
async def serve(tmp_path: Any) -> AsyncIterator[Callable[..., Awaitable[ChairliftTarget]]]:
    """serve(stream, **spec): a target on a server whose StreamGenerate is that generator; on a unix socket, or TCP."""
    open_things: list[Any] = []

    async def served(stream: Stream, *, tcp: bool = False, **spec: Any) -> ChairliftTarget:
        server = grpc.aio.server()
        handlers = {"StreamGenerate": grpc.unary_stream_rpc_method_handler(stream)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("chairlift.v1.GenerationService", handlers),)
        )
        path = tmp_path / f"{len(open_things)}.sock"
        port = server.add_insecure_port("127.0.0.1:0" if tcp else f"unix:{path}")
        await server.start()
        target = ChairliftTarget(TargetSpec(f"grpc://127.0.0.1:{port}" if tcp else f"grpc+unix:{path}", **spec), 5.0)
        open_things.append((target, server))
        return target

    yield served
    for target, server in open_things:
        await target.close()
        await server.stop(None)


def message(**event: Any) -> bytes:
    return pb.StreamGenerateResponse(**event).SerializeToString()


async def test_requests_say_how_long_and_how_drawn(serve: Any) -> None:
    seen = []

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(pb.StreamGenerateRequest.FromString(request).spec)
        yield message(chunk=pb.Chunk(num_tokens=7))
        yield message(finished=pb.Finished())

    for spec in ({}, {"ignore_eos": False, "temperature": 0.5, "model": "m"}):
        target = await serve(stream, **spec)
        await target.send(target.prepare(REQUEST), Tally())
    held, free = seen
    assert (held.stop.max_tokens, held.stop.min_tokens, held.stop.ignore_end_token) == (7, 7, True)
    assert (held.text, held.sampling.temperature, held.model, held.WhichOneof("prompt")) == ("text", 0.0, "", "text")
    assert (free.stop.max_tokens, free.stop.HasField("min_tokens"), free.stop.ignore_end_token) == (7, False, False)
    assert (free.sampling.temperature, free.model) == (0.5, "m")


async def test_the_servers_account_of_its_time_is_passed_on(serve: Any) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        finished = pb.Finished(usage=pb.Usage(num_output_tokens=7), timing=pb.Timing(num_preemptions=3))
        finished.timing.queued.FromMicroseconds(1_250_000)
        finished.timing.tokenized.FromMicroseconds(250_000)
        finished.timing.prefill.FromMicroseconds(42)
        yield message(started=pb.Started(num_prompt_tokens=9, num_cached_tokens=4))
        yield message(chunk=pb.Chunk(num_tokens=0, text="late"))
        yield message(chunk=pb.Chunk(num_tokens=7))
        yield message(finished=finished)

    class Last(Tally):
        def finished(self, num_output_tokens: int, **times: int) -> None:
            super().finished(num_output_tokens)
            self.times = times

    target, last = await serve(stream), Last()
    await target.send(target.prepare(REQUEST), last)
    assert (last.num_input_tokens, last.num_cached_tokens, last.num_tokens, last.num_counted_tokens) == (9, 4, 7, 7)
    assert last.times == {"queued_us": 1_500_000, "prefill_us": 42, "num_preemptions": 3}


@pytest.mark.parametrize("code", [grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_status_of_the_server_is_the_requests_failure(serve: Any, code: grpc.StatusCode) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield message(chunk=pb.Chunk(num_tokens=1))
        await context.abort(code, "the queue is full")

    target = await serve(stream)
    with pytest.raises(RequestFailedError, match=code.name):
        await target.send(target.prepare(REQUEST), Tally())


async def test_a_stream_without_its_last_message_has_failed(serve: Any) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield message(chunk=pb.Chunk(num_tokens=7))

    target = await serve(stream)
    with pytest.raises(RequestFailedError, match="without its last message"):
        await target.send(target.prepare(REQUEST), Tally())


async def test_another_grpc_server_is_told_from_ours(serve: Any) -> None:
    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b""

    target = await serve(stream)
    with pytest.raises(TargetError, match=r"speaks gRPC but has no /chairlift.v1.GenerationService/GetModel"):
        await target.probe()


async def test_streams_are_spread_over_connections_of_their_own(serve: Any) -> None:
    peers: list[str] = []
    all_here = asyncio.Event()

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        peers.append(context.peer())
        if len(peers) == 150:
            all_here.set()
        await all_here.wait()
        yield message(chunk=pb.Chunk(num_tokens=7))
        yield message(finished=pb.Finished())

    target = await serve(stream, tcp=True)
    await asyncio.gather(*(target.send(target.prepare(REQUEST), Tally()) for _ in range(150)))
    assert sorted(collections.Counter(peers).values()) == [22, 64, 64]


async def test_targets_and_the_ticket_of_a_retry_are_sent(serve: Any) -> None:
    seen = []

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        seen.append(pb.StreamGenerateRequest.FromString(request).spec)
        yield message(chunk=pb.Chunk(num_tokens=7))
        yield message(finished=pb.Finished())

    target = await serve(stream)
    named = target.prepare(replace(REQUEST, targets=RequestTargets(service_class="quick")))
    await target.send(named, Tally(), "a ticket")
    await target.send(target.prepare(replace(REQUEST, targets=RequestTargets(ttft_s=0.5, inter_token_s=0.03))), Tally())
    await target.send(target.prepare(REQUEST), Tally())
    by_name, by_number, without = seen
    assert (by_name.latency_targets.service_class, by_name.latency_targets.retry_ticket) == ("quick", b"a ticket")
    assert (by_name.text, by_name.stop.max_tokens) == ("text", 7)
    assert by_number.latency_targets.ttft.ToMilliseconds() == 500
    assert by_number.latency_targets.inter_token.ToMilliseconds() == 30
    assert not by_number.latency_targets.retry_ticket
    assert not without.HasField("latency_targets")


async def test_only_a_refusal_for_targets_says_when_to_come_back(serve: Any) -> None:
    booked_slot = TargetsInfeasible("late", retry_after_s=1.25, retry_ticket="t")
    errors = iter([booked_slot, TargetsInfeasible("late"), QueueFull("full", retry_after_s=1.0)])

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.abort(*error_status(next(errors)))
        yield b""

    target = await serve(stream)
    with pytest.raises(RequestRefusedError, match="RESOURCE_EXHAUSTED: late") as booked:
        await target.send(target.prepare(REQUEST), Tally())
    assert (booked.value.retry_after_s, booked.value.retry_ticket) == (1.25, "t")
    with pytest.raises(RequestRefusedError) as unbooked:
        await target.send(target.prepare(REQUEST), Tally())
    assert (unbooked.value.retry_after_s, unbooked.value.retry_ticket) == (None, "")
    with pytest.raises(RequestFailedError) as full:
        await target.send(target.prepare(REQUEST), Tally())
    assert not isinstance(full.value, RequestRefusedError)
