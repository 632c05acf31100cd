"""Several answers to one prompt on the demo model: each is what its own seed draws, and the prompt is computed once."""

import pytest

from chairlift import Client
from tests.support.pair import PairAddress

PROMPT = "Once upon a time there was a brave fox who lived at the edge of a great dark forest. " * 2
OPTIONS = {"temperature": 1.0, "max_tokens": 40, "return_token_ids": True, "cache_salt": "several answers"}
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def answers(pair: PairAddress):
    with Client(pair.target) as client:
        answer = client.generate(PROMPT, num_answers=5, seed=11, **OPTIONS)
        return [answer, *answer.other_answers]


def test_every_answer_is_what_a_request_with_its_seed_gets(pair: PairAddress, answers) -> None:
    assert answers[0].finished.seed == 11
    with Client(pair.target) as client:
        for answer in answers:
            alone = client.generate(PROMPT, seed=answer.finished.seed, **OPTIONS)
            assert list(alone.token_ids) == list(answer.token_ids)
            assert alone.text == answer.text
            assert alone.finished.reason == answer.finished.reason
    assert len({answer.text for answer in answers}) == 5


def test_other_answers_reuse_every_whole_block_of_the_prompt(answers) -> None:
    first, *others = [answer.finished.usage for answer in answers]
    assert first.num_cached_tokens == 0
    num_whole_blocks = (first.num_prompt_tokens - 1) // BLOCK_SIZE  # one token is always left to compute
    assert num_whole_blocks >= 2
    assert [usage.num_cached_tokens for usage in others] == [num_whole_blocks * BLOCK_SIZE] * 4
    assert {usage.num_prompt_tokens for usage in others} == {first.num_prompt_tokens}


def test_streamed_answers_are_the_same(pair: PairAddress, answers) -> None:
    texts = [""] * 5
    with Client(pair.target) as client, client.stream(PROMPT, num_answers=5, seed=11, **OPTIONS) as stream:
        for chunk in stream:
            texts[chunk.answer_index] += chunk.text
    assert texts == [answer.text for answer in answers]
    assert sorted(stream.all_finished) == [0, 1, 2, 3, 4]
    assert stream.finished == stream.all_finished[0]
