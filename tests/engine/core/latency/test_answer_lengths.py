"""What is known of answers before they end."""

import random
from collections.abc import Callable

import pytest

from engine.core.latency.answer_lengths import AnswerLengths
from engine.core.latency.step_time import Coefficients, StepTimeModel, StepTimePrior
from engine.core.latency.targets import LatencyTargets
from engine.core.request import Request

MakeRequest = Callable[..., Request]


@pytest.fixture
def answer(make_request: MakeRequest) -> Callable[..., Request]:
    def make(num_tokens: int, prompt: int = 100, service_class: str = "chat", max_tokens: int = 100_000) -> Request:
        request = make_request(
            1, prompt, max_tokens=max_tokens, targets=LatencyTargets(ttft_s=1.0, service_class=service_class)
        )
        request.max_num_tokens = prompt + max_tokens
        request.output_ids.extend([2] * num_tokens)
        return request

    return make


def learned(answer: Callable[..., Request], lengths: list[int], **fields: object) -> AnswerLengths:
    answers = AnswerLengths()
    for length in lengths:
        answers.note(answer(length, **fields), is_complete=True)
    return answers


def test_nothing_is_expected_before_enough_answers_have_ended(answer: Callable[..., Request]) -> None:
    assert learned(answer, [50] * 127).expected_rest(answer(0)) == 0.0
    assert learned(answer, [50] * 128).expected_rest(answer(0)) == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize("seed", range(20))
def test_the_rest_is_the_mean_rest_of_the_answers_that_became_as_long(
    answer: Callable[..., Request], seed: int
) -> None:
    """Against a count over the lengths themselves: the bins cost at most a fifth, of which a factor sqrt(2) is wide."""
    rng = random.Random(seed)
    median = rng.uniform(20, 2000)
    lengths = [max(1, round(median * rng.lognormvariate(0.0, rng.choice((0.3, 0.8, 1.2))))) for _ in range(500)]
    answers = learned(answer, lengths)
    for num_tokens in (0, round(median / 3), round(median), round(2 * median)):
        rests = [length - num_tokens for length in lengths if length >= num_tokens]
        if len(rests) >= 50:
            expected = answers.expected_rest(answer(num_tokens))
            assert expected == pytest.approx(sum(rests) / len(rests), rel=0.2, abs=3)


def test_an_answer_that_was_cut_off_counts_as_one_that_became_so_long(answer: Callable[..., Request]) -> None:
    """Of 400 answers of 1,000 tokens half are cut off at 100: those left say 1,000, a plain mean would say 550."""
    answers = learned(answer, [1000] * 200)
    for _ in range(200):
        answers.note(answer(100), is_complete=False)
    assert answers.expected_rest(answer(0)) == pytest.approx(1000, rel=0.2)


def test_classes_and_prompts_are_told_apart_once_there_are_enough(answer: Callable[..., Request]) -> None:
    answers = AnswerLengths()
    for _ in range(200):
        answers.note(answer(10, prompt=20), is_complete=True)
        answers.note(answer(500, prompt=2000), is_complete=True)
        answers.note(answer(2000, prompt=20, service_class="report"), is_complete=True)
    assert answers.expected_rest(answer(0, prompt=20)) == pytest.approx(10, rel=0.3)
    assert answers.expected_rest(answer(0, prompt=20, service_class="report")) == pytest.approx(2000, rel=0.2)
    assert answers.expected_rest(answer(0, prompt=2000, service_class="new")) == pytest.approx(500, rel=0.2)
    assert answers.expected_rest(answer(0, prompt=9, service_class="new")) == pytest.approx(837, rel=0.2)  # all


def test_old_answers_are_forgotten(answer: Callable[..., Request]) -> None:
    answers = learned(answer, [1000] * 2000)
    for _ in range(2000):
        answers.note(answer(10), is_complete=True)
    assert answers.expected_rest(answer(0)) < 60


def test_no_more_is_expected_than_the_request_may_have(answer: Callable[..., Request]) -> None:
    answers = learned(answer, [1000] * 200)
    assert answers.expected_rest(answer(0, max_tokens=64)) == 64
    assert answers.expected_rest(answer(60, max_tokens=64)) == 4
    assert answers.expected_rest(answer(500_000, max_tokens=10**6)) == 0.0  # beyond all that ended


def test_the_cost_is_that_of_the_rows_with_their_context(answer: Callable[..., Request]) -> None:
    answers = learned(answer, [1000] * 200)
    model = StepTimeModel(StepTimePrior(Coefficients(1.0, 0.25, 0.5, 0.125, 7.0)))
    num_rest = answers.expected_rest(answer(0))
    assert answers.expected_s(answer(0), model) == pytest.approx(num_rest * (0.75 + 0.125 * (100 + num_rest / 2)))


def test_memory_is_bounded(answer: Callable[..., Request]) -> None:
    answers = AnswerLengths()
    for number in range(3000):
        answers.note(answer(5, service_class=str(number)), is_complete=True)
    assert len(answers._cells) == 1024
    assert answers.expected_rest(answer(0, service_class="1")) == pytest.approx(5, abs=2)
