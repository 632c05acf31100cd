"""Many schedulers on one runner: none sees anything of those before it."""

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.shapes import write_shape
from chairlift.bench.workload import uniform_workload
from engine.bench.fresh_scheduler import forget_requests, schedule_anew, serve_anew
from engine.bench.serve import engine, serve
from engine.config import EngineConfig
from engine.serving.parts import EngineParts


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> EngineParts:
    model = write_shape("tiny", tmp_path_factory.mktemp("shape"))
    return engine(
        EngineConfig(
            model=str(model),
            load_format="dummy",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=128,
            threads=1,
        )
    )


WORKLOAD = uniform_workload(4, prompt_lens=(20, 60), output_lens=(4, 8), vocab_size=512)


def test_budgets_change_steps_and_not_answers(parts: EngineParts) -> None:
    wide, narrow = serve_anew(parts, WORKLOAD), serve_anew(parts, WORKLOAD, max_num_batched_tokens=16)
    assert wide.output_ids == narrow.output_ids
    assert max(step.num_tokens for step in wide.steps) > 16
    assert max(step.num_tokens for step in narrow.steps) == 16


def test_every_scheduler_begins_with_an_empty_prefix_cache(parts: EngineParts) -> None:
    for _ in range(2):
        scheduled = schedule_anew(parts, enable_prefix_caching=True)
        serve(scheduled, WORKLOAD.prompts, WORKLOAD.max_tokens)
        assert scheduled.scheduler.stats().prefix_cache_hits_total == 0
        serve(scheduled, WORKLOAD.prompts, WORKLOAD.max_tokens)
        assert scheduled.scheduler.stats().prefix_cache_hits_total > 0
        forget_requests(scheduled)


def test_the_runner_has_room_for_any_number_of_rounds(parts: EngineParts) -> None:
    for _ in range(3):  # rows of requests that have ended would fill the runner's four
        serve_anew(parts, WORKLOAD)


def test_requests_that_still_run_are_not_forgotten(parts: EngineParts) -> None:
    scheduled = schedule_anew(parts)
    with pytest.raises(BenchmarkError, match="request 0 got 67 tokens of 200"):
        serve(scheduled, [(1,) * 61], [200])  # the context ends before
    forget_requests(scheduled)


def test_a_budget_above_the_engine_is_a_mistake(parts: EngineParts) -> None:
    with pytest.raises(AssertionError, match="65 tokens in steps of 64"):
        schedule_anew(parts, max_num_batched_tokens=65)
