"""Defaults for template variables have the limits that a request's own have over HTTP."""

import json

import pytest
from pydantic import TypeAdapter, ValidationError

from frontend.api.http.bodies import FreeObject
from frontend.api.http.errors import BodyError
from frontend.api.http.json_reader import read_json
from frontend.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_NUMBER_CHARS, MAX_TOOLS_BYTES
from frontend.slices import at_once
from frontend.text.chat.template_kwargs import OWN_NAMES, are_template_kwargs, parse_json


def nested(num_levels: int) -> str:
    return '{"a":' + "[" * (num_levels - 1) + "]" * (num_levels - 1) + "}"


def is_taken(text: str) -> bool:
    try:
        return are_template_kwargs(parse_json(text))
    except ValueError:
        return False


def is_taken_in_a_body(text: str) -> bool:
    try:
        body = at_once(read_json(f'{{"kwargs":{text}}}'.encode(), (), {}, {"kwargs": MAX_TOOLS_BYTES}))
        TypeAdapter(FreeObject).validate_python(body["kwargs"])
    except (BodyError, ValidationError):
        return False
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", True),
        ('{"enable_thinking": false, "x": [1, 2.5, null, {"y": "\u00e9"}]}', True),
        (nested(MAX_JSON_DEPTH - 1), True),
        (nested(MAX_JSON_DEPTH), False),
        (nested(100_000), False),
        ('{"a": ' + "1" * MAX_NUMBER_CHARS + "}", True),
        ('{"a": ' + "1" * (MAX_NUMBER_CHARS + 1) + "}", False),
        ('{"a": 0.' + "1" * MAX_NUMBER_CHARS + "}", False),
        (json.dumps({"a": "x" * (MAX_TOOLS_BYTES - len('{"a": ""}'))}), True),
        (json.dumps({"a": "x" * MAX_TOOLS_BYTES}), False),
        (json.dumps({"a": [0] * (MAX_JSON_VALUES - 3)}), True),
        (json.dumps({"a": [0] * MAX_JSON_VALUES}), False),
        ('{"a": "\\ud800"}', False),
        ('{"a": [NaN, -Infinity]}', False),
        ('{"a": 1e999}', False),
        ('{"a": }', False),
        ("", False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_limits_are_those_of_a_body(text: str, expected: bool) -> None:
    assert is_taken(text) is is_taken_in_a_body(text) is expected


@pytest.mark.parametrize("text", ["7", "null", "[]", '"a"', *(json.dumps({"a": 1, name: 2}) for name in OWN_NAMES)])
def test_only_an_object_without_the_requests_other_fields_is_taken(text: str) -> None:
    assert not is_taken(text)
