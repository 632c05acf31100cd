"""Stop texts on the bytes of tokens, against a search in the whole answer after each token."""

import random

import pytest

from engine.serving.vllm.stop_texts import StopTextMatcher


def bytes_of(token_id: int) -> bytes:
    return TOKENS[token_id]


TOKENS = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b" ", b"aab", b""]
STOPS = ["ab", "ba b", "é", "aaa", "b", "abab", "a b"]


@pytest.mark.parametrize("seed", range(300))
def test_matches_at_the_token_at_which_a_search_of_everything_finds_one(seed: int) -> None:
    rng = random.Random(seed)
    stops = rng.sample(STOPS, rng.randrange(1, 4))
    matcher, text, num_free = StopTextMatcher(stops, bytes_of), b"", 0
    min_tokens = rng.choice([0, rng.randrange(30)])
    for number in range(30):
        token_id = rng.randrange(len(TOKENS))
        text += TOKENS[token_id]
        if number < min_tokens:
            num_free = len(text)
        ends = [
            (end, -len(stop.encode()), stop)
            for end in range(num_free + 1, len(text) + 1)
            for stop in stops
            if text[:end].endswith(stop.encode())
        ]
        expected = min(ends)[2] if ends else None
        assert matcher.push(token_id, may_match=number >= min_tokens) == expected
        if expected is not None:
            return


def test_a_stop_text_may_begin_in_tokens_at_which_none_ends() -> None:
    matcher = StopTextMatcher(["abab", "b"], bytes_of)
    assert matcher.push(2, may_match=False) is None
    assert matcher.push(8) is None  # "b" was complete before
    assert matcher.push(0) is None
    assert matcher.push(1) == "abab"


def test_a_stop_text_of_one_byte_keeps_nothing_between_tokens() -> None:
    matcher = StopTextMatcher(["b"], bytes_of)
    assert [matcher.push(token_id) for token_id in (0, 4, 6, 3)] == [None, None, None, "b"]
