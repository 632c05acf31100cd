import io
import time

import numpy as np
import pytest

from chairlift.bench.workload import shared_prefix_workload
from engine.bench.null_engine import END_TOKEN_ID, VOCAB_SIZE, NullRunner, null_engine_parts
from engine.bench.serve import serve
from engine.core.request import Request, RequestId, SamplingParams
from engine.interfaces import execute

WORKLOAD = shared_prefix_workload(3, shared_len=0, own_len=4, output_len=10, vocab_size=VOCAB_SIZE - 1)


@pytest.mark.parametrize("hold", [1, 4, 16])
def test_answers_have_their_lengths_and_no_end_token(hold: int) -> None:
    run = serve(
        null_engine_parts(NullRunner(period_s=0.0), max_num_seqs=4, hold=hold), WORKLOAD.prompts, WORKLOAD.max_tokens
    )
    assert [len(ids) for ids in run.output_ids] == [10, 10, 10]
    assert END_TOKEN_ID not in {token_id for ids in run.output_ids for token_id in ids}


def test_held_steps_leave_together() -> None:
    parts = null_engine_parts(NullRunner(period_s=0.0), max_num_seqs=4, hold=4)
    params = SamplingParams(seed=0, max_tokens=10, temperature=0.0, ignore_end_token=True)
    parts.scheduler.add_request(Request(RequestId(1), (1, 2, 3), params, arrival_s=0.0))
    outputs = []
    while parts.scheduler.has_work():
        plan = parts.scheduler.schedule(0.0)
        outputs += parts.scheduler.update(plan, execute(parts.runner, plan), 0.0)
    assert [len(output.token_ids) for output in outputs] == [4, 4, 2]
    assert [output.start_index for output in outputs] == [0, 4, 8]
    assert [output.completion is not None for output in outputs] == [False, False, True]
    assert outputs[0].num_cached_tokens == 0


def test_steps_keep_their_pace_and_their_times() -> None:
    times = io.BytesIO()
    started_ns = time.monotonic_ns()
    parts = null_engine_parts(NullRunner(period_s=0.002, times=times), max_num_seqs=4)
    serve(parts, WORKLOAD.prompts, WORKLOAD.max_tokens)
    times_ns = np.frombuffer(times.getvalue(), dtype=np.int64).tolist()
    assert len(times_ns) == 10
    assert times_ns == sorted(times_ns)
    assert started_ns + 9 * 0.002e9 <= times_ns[-1] <= time.monotonic_ns()
