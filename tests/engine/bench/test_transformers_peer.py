"""`transformers` as a peer: its answers are greedy, complete and independent of the batch."""

import pytest

from chairlift.bench.shapes import SHAPES
from chairlift.bench.workload import Workload, uniform_workload
from engine.bench.agreement import greedy_agreement, load_reference
from engine.bench.shapes import save_checkpoint
from engine.bench.transformers_peer import continuous_batching, generate, generate_streaming

WORKLOAD = Workload(((5, 6, 7), (8,), (9, 10, 11, 12, 13), (14, 15)), (2, 6, 3, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_reference(save_checkpoint("tiny", tmp_path_factory.mktemp("model")))


def test_padded_answers_equal_those_of_each_prompt_alone(model: object) -> None:
    answers, batches = generate(model, WORKLOAD, 3)
    assert tuple(map(len, answers)) == WORKLOAD.max_tokens
    assert batches == [(5, 6), (2, 1)]
    assert greedy_agreement(model, WORKLOAD.prompts, answers).num_wrong == 0
    assert answers == generate(model, WORKLOAD, 1)[0]


def test_continuous_batching_gives_the_same_answers(model: object) -> None:
    with continuous_batching(model, WORKLOAD) as answer:
        answers = answer(WORKLOAD)
    assert greedy_agreement(model, WORKLOAD.prompts, answers).num_wrong == 0


def test_streamed_answers_are_timed_token_by_token(model: object) -> None:
    workload = uniform_workload(3, prompt_lens=(2, 6), output_lens=(3, 5), vocab_size=SHAPES["tiny"].vocab_size)
    run = generate_streaming(model, workload)
    assert tuple(map(len, run.output_ids)) == workload.max_tokens
    assert greedy_agreement(model, workload.prompts, run.output_ids).num_wrong == 0
    times_s = [time_s for times in run.token_times_s for time_s in times]
    assert len(times_s) == workload.num_output_tokens
    assert times_s == sorted(times_s)  # one request after the other
    assert 0 < times_s[0] < times_s[-1] <= run.wall_s
