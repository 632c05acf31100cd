"""Runs a real engine on a fake model, for tests that need sockets but no weights; `client.py` talks to it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ParamSpec

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.config import SchedulerConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import RequestId
from engine.core.scheduler import Scheduler
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.coalescing import CoalescePolicy
from engine.serving.engine import Engine
from engine.serving.listener import Listener
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.parts import EngineParts
from engine.serving.server import EngineService
from engine.serving.vllm.service import serve_vllm
from tests.support.engine.fake_model import FakeModel, FakeModelRunner

_P = ParamSpec("_P")

FAKE_TOKENIZER = TokenizerFiles((("tokenizer.json", b'{"fake": true}'), ("tokenizer_config.json", b"{}")))


def fake_engine_parts(
    *,
    model: FakeModel | None = None,
    num_blocks: int = 256,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    max_waiting: int = 256,
    records_cache_events: bool = False,
    tokenizer: TokenizerFiles = FAKE_TOKENIZER,
    fail: Callable[[RequestId, int], str | None] = lambda _request_id, _position: None,
    on_step: Callable[[SchedulerOutput], None] = lambda _: None,
) -> EngineParts:
    """An engine whose model is the oracle of `fake_model.py`.

    Args:
        model: draws the tokens; its `solo_output` says what they must be.
        num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, max_waiting, records_cache_events:
            see `SchedulerConfig`.
        tokenizer: of the model; grammars and stop texts need a real one.
        fail, on_step: see `FakeModelRunner`.
    """
    model = model or FakeModel()
    config = SchedulerConfig(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
        end_token_ids=model.end_token_ids,
        records_cache_events=records_cache_events,
    )
    info = pb.EngineInfo(
        model="fake",
        weights_revision="fake",
        tokenizer_sha256=tokenizer.sha256(),
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=model.vocab_size,
        end_token_ids=sorted(model.end_token_ids),
        max_logprobs=5,
        engine_version="test",
    )
    runner = FakeModelRunner(model, num_blocks=num_blocks, block_size=block_size, fail=fail, on_step=on_step)
    return EngineParts(
        Scheduler(config),
        runner,
        info,
        tokenizer,
        max_open_requests=max_waiting + max_num_seqs,
        grammars=MatcherCompiler(tokenizer, model.vocab_size, model.end_token_ids),
    )


class _TestLoopIo:
    """`engine.serving.engine.Io` on the event loop of the test.

    grpc.aio cannot serve several loops of one process reliably, so the engine under test shares the loop of its client.
    """

    has_failed = False

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()

    def call(self, function: Callable[_P, object], *args: _P.args, **kwargs: _P.kwargs) -> None:
        self._loop.call_soon_threadsafe(lambda: function(*args, **kwargs))

    def stop(self, grace_s: float) -> None:
        asyncio.run_coroutine_threadsafe(self._listener.stop(grace_s), self._loop).result()


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine under test.

    Attributes:
        address: where to dial.
        engine: to drain or stop.
    """

    address: str
    engine: Engine


@contextlib.asynccontextmanager
async def run_engine(
    parts: EngineParts,
    address: str = "127.0.0.1:0",
    *,
    coalescing: CoalescePolicy | None = None,
    integrity_check_interval_s: float = 0.0,
    serves_vllm: bool = False,
) -> AsyncIterator[RunningEngine]:
    """Serves for the length of a with block: gRPC on the running event loop, the step loop on a thread.

    Args:
        parts: the engine.
        address: "host:port" or "unix:/path".
        coalescing, integrity_check_interval_s: see `Engine`.
        serves_vllm: whether vLLM's API is served too.
    Raises: StepError: at the end of the block, if the engine has failed.
    """
    service, add_services = serve_vllm(0.0) if serves_vllm else (EngineService(), lambda _: None)
    listener = Listener(service, address, add_services=add_services)
    await listener.start()
    engine = Engine(
        service,
        _TestLoopIo(listener),
        parts,
        coalescing=coalescing,
        integrity_check_interval_s=integrity_check_interval_s,
    )
    running = asyncio.create_task(asyncio.to_thread(engine.run))
    try:
        yield RunningEngine(listener.address, engine)
    finally:
        engine.stop()
        await running
