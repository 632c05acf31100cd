"""JSON written in pieces equals JSON written at once."""

import json
from array import array

import pytest

from frontend.api.http.json_writer import chunks, encoded, json_pieces

VALUES = {
    "scalars": [None, True, 1, -1.5, "a"],
    "text": 'aä\n"\\字' * 50_000,
    "numbers": list(range(10_000)),
    "texts": ["a" * (i % 600) for i in range(2000)],
    "rows": [{"token": i, "top": [{"a": 1.5}] * 3} for i in range(1000)],
    "choices": {"choices": [{"text": "x" * 300_000, "logprobs": {"tokens": ["a"] * 500, "top": [{"b": 1}, None]}}] * 3},
    "empty": {"a": [], "b": {}, "c": "", "d": [[], {}, ""]},
    "deep": [[[[[[[[1, [2]]]]]]]]],
}


@pytest.mark.parametrize("name", VALUES)
def test_pieces_add_up_to_the_value(name):
    assert json.loads("".join(json_pieces(VALUES[name]))) == VALUES[name]


@pytest.mark.parametrize("repeats", [1, 10_000])  # in one piece, and in several
def test_line_separators_of_unicode_are_escaped_for_clients_that_split_events_at_them(repeats):
    text = "a\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029字" * repeats
    for written in (encoded({"text": text}), "".join(json_pieces({"text": text}))):
        assert len(written.splitlines()) == 1
        assert json.loads(written) == {"text": text}


def test_iterable_is_written_as_a_list():
    value = {"ids": array("I", range(1000)), "texts": (str(i) for i in range(1000))}
    assert json.loads("".join(json_pieces(value))) == {
        "ids": list(range(1000)),
        "texts": [str(i) for i in range(1000)],
    }


def test_no_piece_is_long():
    value = {"choices": [{"text": "x" * 1_000_000, "logprobs": {"top": [{"a": 1.5, "b": 2.5}] * 50_000}}]}
    assert max(map(len, json_pieces(value))) <= 1 << 17


def test_chunks_are_the_pieces_together():
    pieces = ["a" * 1000] * 5000
    written = list(chunks(pieces))
    whole = [chunk for chunk in written if chunk is not None]
    assert b"".join(whole) == "".join(pieces).encode()
    assert len(whole) == 5
    assert len(written) >= len(pieces)
