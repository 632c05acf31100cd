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
    matcher, text = StopTextMatcher(stops, bytes_of), b""
    for _ in range(30):
        token_id = rng.randrange(len(TOKENS))
        text += TOKENS[token_id]
        ends = [(text.find(stop.encode()) + len(stop.encode()), -len(stop), stop) for stop in stops]
        found = [entry for entry in ends if entry[2].encode() in text]
        expected = min(found)[2] if found else None
        assert matcher.push(token_id) == expected
        if expected is not None:
            return


def test_a_stop_text_of_one_byte_keeps_nothing_between_tokens() -> None:
    matcher = StopTextMatcher(["b"], bytes_of)
    assert [matcher.push(token_id) for token_id in (0, 4, 6, 3)] == [None, None, None, "b"]
