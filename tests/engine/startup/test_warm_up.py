"""Warm-up leaves no trace in the runner."""

from dataclasses import replace

import pytest

from engine.core.config import SchedulerConfig
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.startup.warm_up import warm_up
from tests.support.engine.fake_model import FakeModel, FakeModelRunner, drive


@pytest.mark.parametrize(("max_model_len", "max_waiting"), [(2, 9), (3, 9), (40, 9), (40, 1)])
def test_the_runner_serves_as_new_after_a_warm_up(max_model_len: int, max_waiting: int) -> None:
    model = FakeModel()
    config = SchedulerConfig(
        num_blocks=10,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=5,
        max_model_len=max_model_len,
        max_waiting=max_waiting,
    )
    runner = FakeModelRunner(model, num_blocks=10, block_size=4)
    warm_up(runner, config, vocab_size=model.vocab_size)
    assert runner.num_executed_steps >= 2
    params = SamplingParams(seed=0, max_tokens=8)
    # The ids of the warm-up are free again, which the oracle would not forgive if the runner still knew them.
    requests = [Request(RequestId(-1 - index), (index + 1,), params, arrival_s=0.0) for index in range(2)]
    answers = drive(Scheduler(replace(config, max_waiting=9)), runner, requests)
    for request in requests:
        solo = model.solo_output(request.prompt_ids, params, max_model_len=max_model_len)
        assert tuple(answers[request.request_id].token_ids) == solo.token_ids
