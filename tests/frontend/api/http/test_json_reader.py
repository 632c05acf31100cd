"""The sliced JSON parser: pydantic's values, early refusal over a limit, short slices."""

import json
import random
from array import array
from types import MappingProxyType

import pydantic_core
import pytest

from frontend import limits
from frontend.api.http.errors import BodyError
from frontend.api.http.json_reader import read_json
from frontend.slices import at_once

IDS = ("prompt",)


def read(data, most_entries=(), most_bytes=MappingProxyType({})):
    return at_once(read_json(data, IDS, dict(most_entries), most_bytes))


def lists(value):
    """Arrays as the lists they stand for."""
    if isinstance(value, array):
        return list(value)
    if isinstance(value, list):
        return [lists(entry) for entry in value]
    return {name: lists(entry) for name, entry in value.items()} if isinstance(value, dict) else value


TEXTS = ["", "a", "ä", "字" * 20_000, "\U0001f600" * 9000, "\n" * 40_000, '"\\\b\f\r\t/', "\x7f\u2028", "x" * 70_000]


def random_value(rng, depth=0):
    kind = rng.randrange(8 if depth < 5 else 6)
    match kind:
        case 0:
            return rng.choice([True, False, None])
        case 1:
            return rng.choice([0, -1, 7, 2**31, 2**64, -(2**70)])
        case 2:
            return rng.choice([0.5, -1e300, 1e-7, 3.0])
        case 3 | 4 | 5:
            return rng.choice(TEXTS)[: rng.randrange(1, 50)]
        case 6:
            return [random_value(rng, depth + 1) for _ in range(rng.randrange(6))]
    return {rng.choice(TEXTS)[:5]: random_value(rng, depth + 1) for _ in range(rng.randrange(6))}


@pytest.mark.parametrize("seed", range(200))
def test_values_are_those_of_pydantic(seed):
    rng = random.Random(seed)
    text = json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    assert read(text.encode()) == pydantic_core.from_json(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_long_texts_are_cut_in_no_character(text, ascii_only, shift):
    value = "x" * shift + text * 4
    assert read(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


BROKEN = [
    *(b"", b" ", b"{", b"[", b"[1", b"[1,", b"[1,]", b"[1 2]", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{a:1}", b"{1:1}"),
    *(
        b"01",
        b"1.",
        b"+1",
        b"-",
        b"1e",
        b"0x1",
        b"nul",
        b"True",
        b"tru e",
        b"'a'",
        b'"a',
        b'"\\x"',
        b'"\\u12"',
        b'"\n"',
    ),
    *(b"1 1", b"{} {}", b'"\\ud83d"', b'"\\ude00"', b'"\\ud83d\\u0041"', b'"\x80"', b'"\xed\xa0\x80"', b'"\xff\xff"'),
    *(b'{"prompt":[' + b"1," * 2000 + b"]}", b'{"prompt":[' + b"1," * 2000, b'{"prompt":[' + b"01," * 2000 + b"1]}"),
]


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
def test_invalid_json_is_refused_as_by_pydantic(data):
    with pytest.raises(ValueError, match=r"."):
        pydantic_core.from_json(data)
    with pytest.raises(BodyError, match="the body is not valid JSON"):
        read(data)


@pytest.mark.parametrize("seed", range(300))
def test_bytes_changed_at_random_are_judged_as_pydantic_does(seed):
    rng = random.Random(seed)
    data = bytearray(json.dumps(random_value(rng, 2), ensure_ascii=False).encode())
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.choice(b'{}[]",:\\u09.e \n\x80\xffNI-')
    try:
        expected = pydantic_core.from_json(bytes(data))
    except ValueError:
        with pytest.raises(BodyError):
            read(bytes(data))
    else:
        assert repr(read(bytes(data))) == repr(expected)  # of NaN too


def test_long_lists_of_ids_are_arrays():
    ids = list(range(5000))
    body = {"prompt": ids, "other": ids}
    value = read(json.dumps(body, indent=1).encode())
    assert isinstance(value["prompt"], array)
    assert isinstance(value["other"], list)
    assert lists(value) == body


def test_of_a_list_of_prompts_each_long_one_is_an_array():
    body = {"prompt": [[1, 2], list(range(3000)), [], [7] * 1000]}
    value = read(json.dumps(body).encode())
    assert [isinstance(prompt, array) for prompt in value["prompt"]] == [False, True, False, True]
    assert lists(value) == body


@pytest.mark.parametrize("entry", ['"a"', "1.5", "-1", "4294967296", "null", "[1]", "true"])
@pytest.mark.parametrize("is_last", [True, False])
def test_a_long_list_with_something_else_is_refused(entry, is_last):
    data = '{"prompt":[' + "12," * 2000 + entry + ("]}" if is_last else "," + "12," * 2000 + "12]}")
    match = r"^prompt(\.\d+ must be a token id, as the entries before it| has an entry above 4294967295)"
    with pytest.raises(BodyError, match=match) as caught:
        read(data.encode())
    assert (caught.value.status, caught.value.param) == (400, "prompt")


TOO_MUCH = {
    "values": (b'{"x":[' + b"[]," * 40_000 + b"[]]}", "more than 32768 values, the last of them in x"),
    "members": (b'{"x":{' + b",".join(b'"%d":1' % i for i in range(40_000)) + b"}}", "more than 32768 values"),
    "entries": (b'{"messages":[' + b"{}," * 11 + b"{}]}", "messages has 11 entries or more, at most 10"),
    "depth": (b'{"x":' + b"[" * 100_000, "nested more than 128 levels"),
    "bare depth": (b"[" * 100_000, "nested more than 128 levels"),
    "ids": (b'{"prompt":[' + b"1," * (1 << 20) + b"1,1]}", "prompt has more than 1048576 token ids"),
    "ids of prompts": (b'{"prompt":[' + b",".join([b"[" + b"1," * 1023 + b"1]"] * 1100) + b"]}", "1048576 token ids"),
    "text": (b'{"prompt":"' + b"\\u00e9" * (3 << 19) + b'a"}', "prompt has a text of more than 3145728 bytes of UTF-8"),
    "name": (b'{"' + b"a" * (4 << 20) + b'":1}', "the body has a text of more than 3145728 bytes"),
    "digits": (b'{"x":' + b"1" * 100_000 + b"}", "a number of more than 400"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_with_the_number(name):
    data, message = TOO_MUCH[name]
    with pytest.raises(BodyError, match=message) as caught:
        read(data, {"messages": 10})
    assert caught.value.status == 400


def test_body_over_a_limit_is_not_read_to_its_end():
    data = b'{"x":[' + b"[]," * 400_000
    read_up_to = memoryview(data)[: 8 * limits.MAX_JSON_VALUES].tobytes()
    with pytest.raises(BodyError, match="values"):
        read(read_up_to)
    with pytest.raises(BodyError, match="values"):
        read(data)


LONG = {
    "texts": b'{"x":"' + b"a" * (3 << 20) + b'"}',
    "escapes": b'{"x":"' + b"\\n" * (2 << 20) + b'"}',
    "space": b'{"x":' + b" " * (4 << 20) + b"1}",
    "ids": b'{"prompt":[' + b"1," * (1 << 19) + b"1]}",
}


@pytest.mark.parametrize("name", LONG)
def test_long_things_are_read_in_windows(name):
    data = LONG[name]
    assert sum(1 for _ in read_json(data, IDS, {}, {})) >= len(data) >> 16
