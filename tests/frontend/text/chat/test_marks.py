"""Marks are found in any chunks of a text, and only possible starts of marks are held back."""

import random

import pytest

from frontend.text.chat.hidden import MarkFilter
from frontend.text.chat.marks import Found, mark_finder


def test_leftmost_longest_mark_is_found():
    finder = mark_finder(frozenset({"<s>", "<s>x", "ab"}))
    assert finder.find("1<s>x2") == Found("1", "<s>x", "2")
    assert finder.find("1<s>2") == Found("1", "<s>", "2")
    assert finder.find("1ab<s>x") == Found("1", "ab", "<s>x")


def test_only_possible_starts_of_marks_are_held_back():
    finder = mark_finder(frozenset({"<s>", "<s>x"}))
    assert finder.find("1<s>") == Found("1", None, "<s>")
    assert finder.find("1<") == Found("1", None, "<")
    assert finder.find("1<t") == Found("1<t", None, "")
    assert finder.find_at_end("1<s>") == Found("1", "<s>", "")


def test_finder_without_marks_finds_nothing():
    assert mark_finder(frozenset()).find("any <s>") == Found("any <s>", None, "")


def without(marks, text):
    """Removes the marks from a text, from left to right, the longest first."""
    result, position = [], 0
    while position < len(text):
        here = [mark for mark in marks if text.startswith(mark, position)]
        if here:
            position += len(max(here, key=len))
        else:
            result.append(text[position])
            position += 1
    return "".join(result)


@pytest.mark.parametrize("seed", range(50))
def test_hidden_texts_are_removed_in_any_chunks(seed):
    rng = random.Random(seed)
    for _ in range(30):
        marks = {"".join(rng.choice("ab<") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))}
        text = "".join(rng.choice("ab<c") for _ in range(rng.randrange(30)))
        hidden, parts, start = MarkFilter(mark_finder(frozenset(marks))), [], 0
        for stop in sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8))):
            parts.append(hidden.feed(text[start:stop]))
            start = stop
        parts += [hidden.feed(text[start:]), hidden.finish()]
        assert "".join(parts) == without(marks, text), (marks, text)
