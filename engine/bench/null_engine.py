"""An engine without a model: the real scheduler, step loop and server around a runner that costs nothing.

What a run with it costs is what everything but the model costs. Serves until SIGTERM.
"""

import argparse
import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import grpc.aio

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.config import SchedulerConfig
from engine.core.outputs import ModelRunnerOutput, RequestOutput, SchedulerOutput
from engine.core.request import RequestId
from engine.core.scheduler import Scheduler
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.engine import STOP_GRACE_S, Engine
from engine.serving.io_thread import IoThread
from engine.serving.listener import Listener
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.parts import CheckpointInfo, EngineParts
from engine.serving.server import EngineService
from engine.shutdown import ShutdownSignals

END_TOKEN_ID = 95
VOCAB_SIZE = 96
MODEL_NAME = "null-engine"  # SMG takes "null" for no name
MAX_MODEL_LEN = 1 << 16
_SHUTDOWN_GRACE_S = 5.0


class NullRunner:
    """Answers every row with a printable character, at a pace.

    Args:
        period_s: least time from one step to the next; 0 is no pause at all.
        times: file, unbuffered, for `time.monotonic_ns` at the end of every step that yields tokens: int64.
    """

    def __init__(self, *, period_s: float, times: BinaryIO | None = None) -> None:
        self._period_s = period_s
        self._times = times
        self._next_step_s = 0.0
        self._plans: deque[SchedulerOutput] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """See `ModelRunner.launch`."""
        self._plans.append(plan)

    def collect(self) -> ModelRunnerOutput:
        """See `ModelRunner.collect`."""
        plan = self._plans.popleft()
        if plan.rows and self._period_s:
            self._wait_for_turn()
        token_id = plan.step % END_TOKEN_ID
        token_ids = tuple([token_id if row.samples else -1 for row in plan.rows])
        if self._times is not None and any(row.samples for row in plan.rows):
            self._times.write(time.monotonic_ns().to_bytes(8, sys.byteorder))  # 2 us
        return ModelRunnerOutput(plan.step, token_ids, {}, {})

    def _wait_for_turn(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_step_s:
            time.sleep(self._next_step_s - now_s)
        self._next_step_s = max(now_s, self._next_step_s) + self._period_s


class HoldingScheduler(Scheduler):
    """Lets the news of several steps out together, as those of one step that yields several tokens per request.

    Args:
        config: see `Scheduler`.
        num_steps: how many steps' news leave together.
    """

    def __init__(self, config: SchedulerConfig, num_steps: int) -> None:
        super().__init__(config)
        self._num_steps = num_steps
        self._held: dict[RequestId, RequestOutput] = {}
        self._num_held_steps = 0

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now_s: float) -> list[RequestOutput]:
        """See `Scheduler.update`."""
        for output in super().update(plan, result, now_s):
            held = self._held.get(output.request_id)
            self._held[output.request_id] = output if held is None else _joined(held, output)
        self._num_held_steps += 1
        if self._num_held_steps < self._num_steps and self.has_work():
            return []
        outputs = list(self._held.values())
        self._held.clear()
        self._num_held_steps = 0
        return outputs


def _joined(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """The news of one request, from two steps."""
    return first._replace(token_ids=first.token_ids + second.token_ids, completion=second.completion)


def null_engine_parts(
    runner: NullRunner, *, max_num_seqs: int, hold: int = 1, max_model_len: int = MAX_MODEL_LEN
) -> EngineParts:
    """Room for `max_num_seqs` requests of any length, and a byte-level tokenizer of printable characters.

    Args:
        runner: answers.
        max_num_seqs: requests per step.
        hold: steps whose news leave together.
        max_model_len: most tokens of prompt and answer.
    """
    block_size = 16
    num_blocks = max_num_seqs * max_model_len // block_size
    scheduler = HoldingScheduler(
        SchedulerConfig(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(512, max_num_seqs),
            max_model_len=max_model_len,
            end_token_ids=frozenset({END_TOKEN_ID}),
        ),
        hold,
    )
    tokenizer = _tokenizer()
    info = pb.EngineInfo(
        model=MODEL_NAME,
        weights_revision="none",
        tokenizer_sha256=tokenizer.sha256(),
        max_model_len=max_model_len,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(512, max_num_seqs),
        vocab_size=VOCAB_SIZE,
        end_token_ids=[END_TOKEN_ID],
    )
    grammars = MatcherCompiler(tokenizer, VOCAB_SIZE, frozenset({END_TOKEN_ID}))
    return EngineParts(
        scheduler,
        runner,
        info,
        tokenizer,
        max_open_requests=2 * max_num_seqs,
        grammars=grammars,
        checkpoint=CheckpointInfo(path=f"/{MODEL_NAME}"),  # no such folder: gateways ask for the tokenizer
    )


def _tokenizer() -> TokenizerFiles:
    """One token per printable ASCII character, decoded as the byte-level vocabularies of today's models are."""
    characters = [chr(code) for code in range(ord("!"), ord("!") + END_TOKEN_ID)]
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {c: index for index, c in enumerate(characters)}, "merges": []},
    }
    return TokenizerFiles((("tokenizer.json", json.dumps(tokenizer).encode()),))


def _services(*, serves_vllm: bool) -> tuple[EngineService, Callable[[grpc.aio.Server], None]]:
    """Returns the engine's own service, and what adds others to its server."""
    if not serves_vllm:
        return EngineService(), lambda _: None
    from engine.serving.vllm.service import serve_vllm  # needs the extra `engines`

    return serve_vllm(0.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until told to stop."""
    parser = argparse.ArgumentParser(prog="null-engine", description=__doc__)
    address = parser.add_mutually_exclusive_group(required=True)
    address.add_argument("--uds", type=Path, help="socket to listen on")
    address.add_argument("--port", type=int, help="port of 127.0.0.1 to listen on")
    parser.add_argument("--vllm-api", action="store_true", help="serve vLLM's API too")
    parser.add_argument("--exit-on-stdin-close", action="store_true", help="exit when standard input closes")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="requests per step")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN, help="tokens of prompt and answer")
    parser.add_argument("--hold", type=int, default=1, help="steps whose tokens leave together")
    parser.add_argument("--period-us", type=int, default=0, help="from one step to the next; 0: no pauses")
    parser.add_argument("--times", type=Path, help="file for the time of every step, int64 nanoseconds")
    options = parser.parse_args(argv)

    signals = ShutdownSignals(_SHUTDOWN_GRACE_S)
    if options.exit_on_stdin_close:
        signals.watch_stdin()
    service, add_services = _services(serves_vllm=options.vllm_api)
    listen_on = f"unix:{options.uds}" if options.uds else f"127.0.0.1:{options.port}"
    io = IoThread(lambda: Listener(service, listen_on, add_services=add_services), signals.stop)
    io.start()
    try:
        with contextlib.ExitStack() as stack:
            times = stack.enter_context(options.times.open("wb", buffering=0)) if options.times else None
            runner = NullRunner(period_s=options.period_us / 1e6, times=times)
            parts = null_engine_parts(
                runner,
                max_num_seqs=options.max_num_seqs,
                hold=options.hold,
                max_model_len=options.max_model_len,
            )
            engine = Engine(service, io, parts)
            signals.control(engine)
            engine.run()
    finally:
        io.stop(STOP_GRACE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
