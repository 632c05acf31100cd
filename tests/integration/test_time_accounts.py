"""Time accounts of a real scheduler where everything costs time: a cache that is too small, slow readers, budgets,
stop texts, several answers.
"""

import asyncio
import dataclasses
import random
import time

from google.protobuf.duration_pb2 import Duration

from chairlift.v1 import generation_service_pb2 as pb
from engine.core.outputs import SchedulerOutput
from engine.model.tokenizer_files import TokenizerFiles
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.generation.deadline import Deadline
from tests.hang import HANG_S
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files

PARTS = ("queued", "tokenized", "prefill", "decode", "parked", "preempted", "moved")
STEP_S = 0.001
LAG_S = 1.0  # from the end of an answer until its last message is read, on a machine that does not stall


def take_a_moment(plan: SchedulerOutput) -> None:
    if plan.rows:
        time.sleep(STEP_S)


def small_engine():
    files = TokenizerFiles(tuple(byte_tokenizer_files().items()))
    parts = fake_engine_parts(
        model=FakeModel(vocab_size=VOCAB_SIZE, end_token_ids=frozenset({END_TOKEN_ID}), end_probability=0.01),
        num_blocks=24,
        max_num_seqs=6,
        max_num_batched_tokens=8,
        max_model_len=96,
        on_step=take_a_moment,
    )
    parts.info.tokenizer_sha256 = files.sha256()
    return dataclasses.replace(parts, tokenizer=files)


async def test_accounts_add_up_and_say_what_cost_the_time() -> None:
    rng = random.Random(6)
    kinds = dict.fromkeys(PARTS, 0)
    reasons = set()
    unaccounted_s = []
    stalled_s = 0.0

    async def watch_stalls() -> None:
        nonlocal stalled_s
        while True:
            due_s = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            stalled_s += time.monotonic() - due_s

    async with run_engine(small_engine()) as server:
        config = FrontendConfig(port=0, http=False, engine=(server.address,), token_window=4)
        app = FrontendApp(config)
        await app.start()
        await app.wait_serving(HANG_S)

        async def one(number: int) -> None:
            stop = pb.StopOptions(max_tokens=rng.randrange(1, 48), ignore_end_token=rng.random() < 0.5)
            if rng.random() < 0.3:
                stop.stop_texts.extend("abcdefghij")
            if rng.random() < 0.2:
                stop.time_budget.CopyFrom(Duration(nanos=rng.randrange(1, 200) * 1_000_000))
            spec = pb.GenerationSpec(
                text=f"{number:03d}" * rng.randrange(1, 15), num_answers=rng.choice([1, 1, 3]), stop=stop
            )
            pause_s = rng.choice([0.0, 0.0, 0.01])
            began_s = time.monotonic()
            async with app._generations.open(spec, Deadline.at(None)) as answer:
                async for message in answer.messages():
                    if message.HasField("finished"):
                        check(message.finished, time.monotonic() - began_s)
                    elif pause_s:
                        await asyncio.sleep(pause_s)  # a slow reader

        def check(finished: pb.Finished, wall_s: float) -> None:
            timing = finished.timing
            nanos = [getattr(timing, part).ToNanoseconds() for part in PARTS]
            assert min(nanos) >= 0
            assert sum(nanos) == timing.total.ToNanoseconds()
            unaccounted_s.append(wall_s - timing.total.ToNanoseconds() / 1e9)
            assert timing.HasField("first_token") == bool(finished.usage.num_output_tokens)
            for part, part_nanos in zip(PARTS, nanos, strict=True):
                kinds[part] += part_nanos >= 1e9 * STEP_S
            # A request that is preempted without credit is parked all the while.
            assert timing.num_preemptions or not timing.preempted.ToNanoseconds()
            reasons.add(finished.reason)

        watch = asyncio.create_task(watch_stalls())
        await asyncio.gather(*(one(number) for number in range(60)))
        await asyncio.sleep(0.02)  # notes the last stall
        watch.cancel()
        await app.stop()
    assert min(unaccounted_s) >= 0
    assert max(unaccounted_s) < LAG_S + stalled_s
    assert reasons >= {
        pb.FINISH_REASON_END_TOKEN,
        pb.FINISH_REASON_STOP_TEXT,
        pb.FINISH_REASON_MAX_TOKENS,
        pb.FINISH_REASON_TIME_BUDGET,
    }
    assert min(kinds[part] for part in ("queued", "prefill", "decode", "parked", "preempted")) >= 3, kinds
    assert kinds["moved"] == 0
