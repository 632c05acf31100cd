"""Stop texts are found across chunk borders as in the whole text; nothing is sent too early."""

import random

import pytest

from frontend.generation.answer.stop_texts import StopTextMatcher


def first_match(text: str, stop_texts: list[str], num_free: int = 0) -> tuple[int, str] | None:
    """The rule, spelled out: the match that is complete first after num_free characters, of those the longest. Returns
    (end, stop text).
    """
    for end in range(num_free + 1, len(text) + 1):
        for stop_text in sorted(stop_texts, key=len, reverse=True):
            if text[:end].endswith(stop_text):
                return end, stop_text
    return None


def chunked(text: str, rng: random.Random) -> list[str]:
    chunks = []
    while text:
        size = rng.randint(1, 5)
        chunks.append(text[:size])
        text = text[size:]
    return chunks


@pytest.mark.parametrize("include", [False, True])
def test_matches_brute_force_over_random_texts_and_chunk_borders(include):
    rng = random.Random(20240)
    num_matched = 0
    for _ in range(4000):
        alphabet = rng.choice(["ab", "abc", "aé🙂"])
        text = "".join(rng.choices(alphabet, k=rng.randint(0, 40)))
        stop_texts = ["".join(rng.choices(alphabet, k=rng.randint(1, 6))) for _ in range(rng.randint(1, 5))]
        matcher = StopTextMatcher(stop_texts, include=include)
        chunks, sent = chunked(text, rng), ""
        num_free = rng.choice([0, rng.randint(0, len(chunks))])  # chunks in which nothing may match
        for number, chunk in enumerate(chunks):
            sent += matcher.push(chunk, may_match=number >= num_free)
            assert text.startswith(sent)
        sent += matcher.finish()
        expected = first_match(text, stop_texts, len("".join(chunks[:num_free])))
        if expected is None:
            assert (sent, matcher.matched) == (text, None)
        else:
            num_matched += 1
            end, stop_text = expected
            assert matcher.matched == stop_text, (text, stop_texts)
            assert sent == text[: end if include else end - len(stop_text)], (text, stop_texts)
    assert 1000 < num_matched < 3900  # both outcomes were exercised


def test_held_back_text_is_at_most_the_longest_possible_prefix():
    rng = random.Random(7)
    for _ in range(500):
        stop_texts = ["".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(3)]
        matcher = StopTextMatcher(stop_texts, include=False)
        text, sent = "", ""
        while matcher.matched is None and len(text) < 30:
            char = rng.choice("abc")
            text += char
            sent += matcher.push(char)
            if matcher.matched is None:
                beginnings = [s[:n] for s in stop_texts for n in range(1, len(s)) if text.endswith(s[:n])]
                assert len(text) - len(sent) == max(map(len, beginnings), default=0)


def test_the_match_completed_first_wins_over_one_that_began_earlier():
    matcher = StopTextMatcher(["abcd", "bc"], include=False)
    assert [matcher.push(char) for char in "xabcd"] == ["x", "", "", "a", ""]
    assert matcher.matched == "bc"


def test_the_longest_wins_among_matches_completed_together():
    matcher = StopTextMatcher(["c", "abc", "bc"], include=False)
    assert matcher.push("xxabc and more") == "xx"
    assert matcher.matched == "abc"


def test_included_stop_text_ends_the_answer_and_nothing_is_held_back():
    matcher = StopTextMatcher(["END"], include=True)
    assert matcher.push("so E") == "so E"
    assert matcher.push("ND of it") == "ND"
    assert matcher.push("more") == ""
    assert matcher.finish() == ""


def test_nothing_follows_a_match():
    matcher = StopTextMatcher(["\n\n"], include=False)
    assert matcher.push("one\n\ntwo") == "one"
    assert matcher.push("three") == ""
    assert matcher.finish() == ""


def test_held_text_is_released_when_the_answer_ends():
    matcher = StopTextMatcher(["</answer>"], include=False)
    assert matcher.push("42</ans") == "42"
    assert matcher.finish() == "</ans"
    assert matcher.matched is None


def test_without_stop_texts_all_text_passes():
    matcher = StopTextMatcher([], include=False)
    assert matcher.push("anything") == "anything"
    assert matcher.finish() == ""


def test_characters_special_in_patterns_are_ordinary():
    matcher = StopTextMatcher(["]^-\\", "[.]"], include=False)
    assert matcher.push("a.b[.x]^") == "a.b[.x"
    assert matcher.push("-\\") == ""
    assert matcher.matched == "]^-\\"


def test_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="at least one character"):
        StopTextMatcher(["a", ""], include=False)
