"""Warm-up leaves no trace in the runner."""

from dataclasses import replace

import pytest

from engine.core.config import SchedulerConfig
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId, SamplingParams
from engine.core.scheduler import Scheduler
from engine.startup.warm_up import run_largest_step, sweep_sizes, warm_up
from tests.support.engine.answer_ledger import drive
from tests.support.engine.fake_model import FakeModel, FakeModelRunner


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


class SizesRunner(FakeModelRunner):
    """Records the tokens and rows of each step."""

    def __init__(self, model: FakeModel, num_blocks: int, block_size: int) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=block_size)
        self.sizes: list[tuple[int, int]] = []

    def launch(self, plan: SchedulerOutput) -> None:
        if plan.rows:
            self.sizes.append((plan.num_tokens, len(plan.rows)))
        super().launch(plan)


def test_a_sweep_runs_steps_of_all_sizes_up_to_the_limits_and_many_biases() -> None:
    model = FakeModel()
    config = SchedulerConfig(
        num_blocks=256, block_size=16, max_num_seqs=130, max_num_batched_tokens=300, max_model_len=400, max_waiting=9
    )
    runner = SizesRunner(model, num_blocks=256, block_size=16)
    sweep_sizes(runner, config, vocab_size=model.vocab_size)
    tokens, rows = ({size[index] for size in runner.sizes} for index in (0, 1))
    few = {1, 2, 4, 8, 16, 32}
    assert few <= tokens
    assert all(any(limit - 64 < size <= limit for size in tokens) for limit in (64, 128, 192, 256, 300))
    assert few & rows >= {1, 2, 4, 8}
    assert max(rows) > 64


def test_a_sweep_with_fewer_blocks_than_slots_runs_what_the_cache_holds() -> None:
    model = FakeModel()
    config = SchedulerConfig(
        num_blocks=12, block_size=16, max_num_seqs=130, max_num_batched_tokens=300, max_model_len=100, max_waiting=9
    )
    runner = SizesRunner(model, num_blocks=12, block_size=16)
    sweep_sizes(runner, config, vocab_size=model.vocab_size)
    tokens, rows = ({size[index] for size in runner.sizes} for index in (0, 1))
    assert {1, 2, 4, 8} <= tokens
    assert max(tokens) > 64
    assert max(rows) == 12


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"), [(8, [(32, 8)]), (20, [(32, 20)]), (31, [(32, 31)]), (32, [(32, 32), (32, 1)])]
)
def test_the_largest_step_has_all_tokens_and_all_rows(max_num_seqs: int, sizes: list[tuple[int, int]]) -> None:
    """Also if the rows do not divide the tokens: the memory of the rest would be given to the cache. A step of one
    token per row does not launch the kernels of prompts.
    """
    model, config = (
        FakeModel(),
        SchedulerConfig(
            num_blocks=32, block_size=4, max_num_seqs=max_num_seqs, max_num_batched_tokens=32, max_model_len=128
        ),
    )
    runner = SizesRunner(model, num_blocks=32, block_size=4)
    run_largest_step(runner, config, model.vocab_size, has_adapters=False)
    assert runner.sizes == sizes
