"""Results per row on the host: tokens, requested log-probabilities, and failures."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import SamplingParams
from engine.runner.batch import BatchBuilder
from engine.runner.request_state import RequestState
from engine.runner.sampler import SampledBuffer
from engine.runner.sampling_state import SamplingState
from engine.runner.stream import InlineStream
from kernels.sampling import greedy_batch
from tests.support.engine.stream import LateStream

LOGITS = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, 0.0], [5.0, float("nan"), 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])


@pytest.fixture(params=[InlineStream(), LateStream()], ids=["inline", "late"])
def output(request, ops):
    """Five greedy rows in another order than their state: no logprobs, 20 and 1 alternatives; NaN; nothing allowed."""
    changes = [
        {},
        {"top_logprobs": 20},
        {"top_logprobs": 2},
        {"top_logprobs": 1},
        {"min_tokens": 1, "stop_token_ids": (0, 1, 2), "top_logprobs": 1},
    ]
    sampling = SamplingState(max_num_seqs=5, vocab_size=3, end_token_ids=())
    state = RequestState(max_num_seqs=5, max_model_len=4, block_size=4, sampling=sampling)
    for request_id in (3, 0, 4, 2, 1):
        params = SamplingParams(seed=0, max_tokens=2, temperature=0.0, **changes[request_id])
        state.apply(SchedulerOutput(1, (), (NewRequest(request_id, (1,), 1, params, (0,)),), (), 0))
    builder = BatchBuilder(max_num_seqs=5, max_num_batched_tokens=5, max_model_len=4, block_size=4)
    rows = tuple(ScheduledRow(request_id, 1, 0, (), True) for request_id in range(5))
    batch = builder.build(SchedulerOutput(2, (), (), rows, 5), state)
    sampling = batch.sampling(torch.from_numpy(state.token_ids))
    buffer = SampledBuffer(request.param, 5, 20)
    buffer.receive(ops.sample(LOGITS, sampling), sampling.max_top_logprobs)
    return buffer.read(batch.columns.top_logprobs, batch.columns.max_top_logprobs)


def test_each_row_has_its_own_token(output):
    assert output.token_ids.tolist() == [1, 0, -1, 2, -1]


def test_failures_name_their_cause(output):
    assert output.failures.keys() == {2, 4}
    assert "NaN" in output.failures[2]
    assert "logit_bias" in output.failures[4]


def test_logprobs_are_of_the_rows_that_asked_and_did_not_fail(output):
    assert output.logprobs.keys() == {1, 3}
    logprobs = LOGITS.double().log_softmax(-1).numpy()
    assert output.logprobs[1].top_ids == (0, 1, 2)  # 20 were asked for, the vocabulary has 3
    np.testing.assert_allclose(output.logprobs[1].top_values, logprobs[1], rtol=1e-12)
    assert output.logprobs[3].top_ids == (2,)
    assert output.logprobs[3].chosen == output.logprobs[3].top_values[0] == pytest.approx(logprobs[3][2])


def test_memory_for_the_most_alternatives_is_allocated_before_the_first_step(monkeypatch, ops):
    """Pinned memory that grows when a request asks for more would stall a step."""
    stream = LateStream()
    buffer = SampledBuffer(stream, 2, 20)
    monkeypatch.setattr(stream, "host_buffer", pytest.fail)
    batch = greedy_batch(2, torch.device("cpu"), max_top_logprobs=20)
    sampled = ops.sample(torch.randn(2, 30), replace(batch, top_logprobs=torch.full((2,), 20, dtype=torch.int32)))
    buffer.receive(sampled, 20)
    output = buffer.read(np.full(2, 20, dtype=np.int32), 20)
    assert [len(logprobs.top_ids) for logprobs in output.logprobs.values()] == [20, 20]
