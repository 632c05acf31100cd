"""The in-process engine on a fake model: arrival times and recorded steps."""

from dataclasses import dataclass

import pytest

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.serve import serve
from engine.core.config import SchedulerConfig
from engine.core.scheduler import Scheduler
from tests.support.engine.fake_model import FakeModel, FakeModelRunner


@dataclass(frozen=True)
class Parts:
    scheduler: Scheduler
    runner: FakeModelRunner


def make_parts(**config: int) -> Parts:
    limits = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **config}
    runner = FakeModelRunner(FakeModel(end_probability=0.0), num_blocks=limits["num_blocks"])
    return Parts(Scheduler(SchedulerConfig(**limits)), runner)


def test_each_request_gets_its_tokens_and_each_token_its_time() -> None:
    prompts, max_tokens = [(5,) * 3, (6,) * 7, (7,) * 2], [4, 1, 6]
    run = serve(make_parts(), prompts, max_tokens)
    assert [len(ids) for ids in run.output_ids] == max_tokens
    assert run.num_output_tokens == 11
    for index, times_s in enumerate(run.token_times_s):
        assert len(times_s) == max_tokens[index]
        assert list(times_s) == sorted(times_s)
        assert len(run.gaps_s(index)) == max_tokens[index] - 1
        assert run.ttft_s(index) == times_s[0] - run.arrivals_s[index]
    assert run.tokens_per_s == 11 / run.wall_s


def test_each_step_counts_its_rows_and_tokens() -> None:
    run = serve(make_parts(), [(5,) * 3, (6,) * 7], [3, 2])
    assert [(step.num_rows, step.num_tokens, step.num_outputs) for step in run.steps] == [
        (2, 10, 2),
        (2, 2, 2),
        (1, 1, 1),
    ]
    for step in run.steps:
        assert 0 < step.execute_s < step.seconds
        assert step.ended_s <= run.wall_s


def test_the_answers_do_not_depend_on_when_requests_arrive() -> None:
    prompts, max_tokens = [(5,) * 3, (6,) * 7, (7,) * 2], [4, 9, 6]
    at_once = serve(make_parts(), prompts, max_tokens)
    assert serve(make_parts(), prompts, max_tokens, after_steps=[0, 2, 5]).output_ids == at_once.output_ids
    assert serve(make_parts(), prompts, max_tokens, arrivals_s=[0.0, 0.001, 0.002]).output_ids == at_once.output_ids


def test_a_request_joins_after_the_steps_it_is_to_wait_for() -> None:
    run = serve(make_parts(), [(5,) * 3, (6,) * 4], [8, 2], after_steps=[0, 5])
    assert [step.num_tokens for step in run.steps] == [3, 1, 1, 1, 1, 1 + 4, 1 + 1, 1]


def test_with_nothing_else_to_do_the_next_request_comes_at_once() -> None:
    run = serve(make_parts(), [(5,) * 3, (6,) * 4], [2, 2], after_steps=[0, 100])
    assert [step.num_tokens for step in run.steps] == [3, 1, 4, 1]


def test_no_request_starts_before_its_arrival() -> None:
    run = serve(make_parts(), [(5,) * 3, (6,) * 4], [2, 2], arrivals_s=[0.0, 0.05])
    assert run.arrivals_s == (0.0, 0.05)
    assert run.token_times_s[1][0] > 0.05
    assert 0 < run.ttft_s(1) < run.token_times_s[1][0] - 0.04


def test_one_engine_serves_again_and_again() -> None:
    parts = make_parts()
    assert serve(parts, [(5, 6)], [4]).output_ids == serve(parts, [(5, 6)], [4]).output_ids


def test_an_answer_cut_short_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="request 1 got 4 tokens of 9"):
        serve(make_parts(max_model_len=12), [(5,) * 2, (6,) * 8], [9, 9])
