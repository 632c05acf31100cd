"""Log-probabilities of a text are the same whether the demo model reads it as a prompt or generates it."""

import pytest

from chairlift import Client
from tests.support.pair import PairAddress

TOLERANCE = 2e-3  # fp32 sums in another order
STORY = "Once upon a time there was a small fox who lived in the wood. " * 8


@pytest.fixture
def client(pair: PairAddress) -> Client:
    return Client(pair.target)


def test_reading_an_answer_scores_it_as_writing_it_did(client: Client) -> None:
    with client:
        written = client.generate(
            "Once upon a time", temperature=0.0, max_tokens=24, top_logprobs=3, return_token_ids=True, echo=True
        )
        read = client.generate(
            token_ids=[*written.prompt.token_ids, *written.token_ids],
            prompt_logprobs=3,
            max_tokens=0,
            return_token_ids=True,
        )
    num_tokens = len(written.token_ids)
    assert list(read.prompt.token_ids[-num_tokens:]) == list(written.token_ids)
    assert list(read.prompt.logprobs.chosen[-num_tokens:]) == pytest.approx(
        list(written.logprobs.chosen), abs=TOLERANCE
    )
    assert list(read.prompt.logprobs.top_values[-3 * num_tokens :]) == pytest.approx(
        list(written.logprobs.top_values), abs=TOLERANCE
    )
    # Greedy: each token that was written is the best one.
    assert list(read.prompt.logprobs.top_ids[-3 * num_tokens :: 3]) == list(written.token_ids)
    assert read.finished.usage.num_output_tokens == 0


def test_prompt_in_pieces_or_cached_is_scored_the_same(client: Client) -> None:
    options = {"prompt_logprobs": 2, "max_tokens": 1, "temperature": 0.0}
    with client:
        whole = client.generate(STORY, **options)
        again = client.generate(STORY, **options)  # its blocks are cached now
        # A chunk has one token per free slot: smaller ones beside running requests.
        with client.stream("Once upon a time", num_answers=16, max_tokens=900, ignore_end_token=True) as others:
            next(others)
            pieces = client.generate(STORY, **options)
            assert not others.all_finished
    for answer in (again, pieces):
        assert len(answer.prompt.logprobs.chosen) == answer.finished.usage.num_prompt_tokens - 1
        assert list(answer.prompt.logprobs.chosen) == pytest.approx(list(whole.prompt.logprobs.chosen), abs=TOLERANCE)
        assert answer.text == whole.text
