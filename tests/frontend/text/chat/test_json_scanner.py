"""The scanner finds the same objects, ends and members as Python's json module."""

import json
import random

import pytest

from frontend.text.chat.json_scanner import JsonObjectScanner, Part

NOTHING = object()


def scan(text, cuts=()):
    """Scans a text in pieces; returns the members' values as text and the end of the object, None without an end."""
    scanner, members, key = JsonObjectScanner(), {}, None
    start = 0
    for stop in [*cuts, len(text)]:
        position = start
        piece = text[start:stop]
        while position < stop:
            part, end = scanner.scan(piece, position - start)
            end += start
            if part is Part.ERROR:
                return members, None
            if part is Part.END:
                return members, end
            if part in (Part.VALUE, Part.CONTROL):
                if key is None:
                    key = scanner.key
                    members[key] = ""
                members[key] += text[position:end]
            else:
                key = None
            position = end
        start = stop
    return members, None


def expected(text):
    """Returns the object and its end according to the standard library."""

    def strict_constant(name):
        raise ValueError(name)  # NaN and Infinity are not JSON

    try:
        start = len(text) - len(text.lstrip(" \t\r\n"))
        value, end = json.JSONDecoder(strict=False, parse_constant=strict_constant).raw_decode(text, start)
    except ValueError:
        return NOTHING, None
    return (value, end) if isinstance(value, dict) else (NOTHING, None)


def random_value(rng, depth=0):
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([0, -1, 12, 1.5, -0.25, 1e30, 2e-7])
    if kind < 6:
        return "".join(rng.choice('ab {}[],:"\\/\n\té🙂\x7f') for _ in range(rng.randrange(8)))
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {random_value_text(rng): random_value(rng, depth + 1) for _ in range(rng.randrange(4))}


def random_value_text(rng):
    return "".join(rng.choice('ab"\\}é') for _ in range(rng.randrange(4)))


def random_object_text(rng, indents=(None, 0, 2)):
    value = {random_value_text(rng): random_value(rng) for _ in range(rng.randrange(4))}
    return json.dumps(value, indent=rng.choice(indents), ensure_ascii=rng.random() < 0.5)


@pytest.mark.parametrize("seed", range(10))
def test_end_and_members_of_objects_are_those_of_json(seed):
    rng = random.Random(seed)
    for _ in range(30):
        check_object(rng)


def check_object(rng):
    text = random_object_text(rng) + rng.choice(["", "}", "]", " x", '{"a": 1}', ","])
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(6)))
    value, end = expected(text)
    members, found_end = scan(text, cuts)
    assert found_end == end
    assert {key: json.loads(part) for key, part in members.items()} == value


@pytest.mark.parametrize("seed", range(10))
def test_broken_objects_are_refused_exactly_when_json_refuses_them(seed):
    rng = random.Random(seed)
    for _ in range(200):
        text = list(random_object_text(rng, indents=[None]))  # the scanner refuses newlines in names
        for _ in range(rng.randrange(1, 3)):
            position = rng.randrange(len(text) + 1)
            if rng.random() < 0.5 and position < len(text):
                del text[position]
            else:
                text.insert(position, rng.choice('{}[]",:\\u0e+-.1tn '))
        broken = "".join(text)
        assert scan(broken)[1] == expected(broken)[1], broken


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 01}',
        '{"a": 1.}',
        '{"a": .5}',
        '{"a": +1}',
        '{"a": 1e}',
        '{"a": NaN}',
        '{"a": True}',
        '{"a": nul}',
        '{"a": "\\x"}',
        '{"a": "\\u12g4"}',
        "{'a': 1}",
        '{"a" 1}',
        '{"a": 1,}',
        '{"a": [1,]}',
        '{"a": [1}',
        '{"a": {]}',
        '{"a": 1 2}',
        '{,"a": 1}',
        "[]",
        '"a"',
        "}",
    ],
)
def test_text_that_is_not_a_json_object_is_an_error(text):
    assert expected(text) == (NOTHING, None)
    assert scan(text)[1] is None


def test_nesting_is_not_limited_by_recursion():
    text = '{"a": ' + "[" * 10_000 + "]" * 10_000 + "}"
    assert scan(text)[1] == len(text)
