"""docs/api.md knows every field that a request may have."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor

from chairlift.v1 import generation_service_pb2 as pb

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def field_names(message: Descriptor, seen: set[str]) -> Iterator[str]:
    """Names of a message's fields, and of those of the messages in it that are ours."""
    if message.full_name in seen or message.file.package != pb.DESCRIPTOR.package or message.GetOptions().map_entry:
        return
    seen.add(message.full_name)
    for field in message.fields:
        yield field.name
        if field.message_type is not None:
            yield from field_names(field.message_type, seen)


def request_fields() -> list[str]:
    methods = pb.DESCRIPTOR.services_by_name["GenerationService"].methods
    seen: set[str] = set()
    return sorted({name for method in methods for name in field_names(method.input_type, seen)})


def test_the_walk_reaches_the_innermost_fields():
    assert {"spec", "frequency_penalty", "arguments_json", "texts", "return_token_ids"} <= set(request_fields())


@pytest.mark.parametrize("name", request_fields())
def test_every_field_of_a_request_is_described(name):
    assert f"`{name}`" in PAGE.read_text(encoding="utf-8")
