"""docs/protocol.md has every message, field and enum value of the engine's proto, and the code's numbers."""

import importlib
import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service import engine_protocol
from chairlift.service.sampling_fields import SAMPLING
from chairlift.v1 import generation_service_pb2 as public_pb
from frontend.errors import RequestError, error_reason

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SECTIONS = re.split(r"\n##+ ", PAGE)
CODE = re.compile(r"`([^`\n]+)`")


def code_of(text: str) -> set[str]:
    """Words in backticks; of `A.b` both."""
    return {word for found in CODE.findall(text) for word in re.findall(r"\w+", found)}


def sections_about(message: str) -> str:
    """The sections that name a message, in backticks or in a diagram."""
    found = [text for text in SECTIONS if re.search(rf"\b{message}s?\b", text)]
    assert any(message in code_of(text) for text in found), f"{message} is not on the page"
    return "\n".join(found)


@pytest.mark.parametrize("message", sorted(pb.DESCRIPTOR.message_types_by_name))
def test_every_field_of_a_message_is_told_where_the_message_is(message: str) -> None:
    names = {field.name for field in pb.DESCRIPTOR.message_types_by_name[message].fields}
    if message == "Sampling":
        names -= SAMPLING.keys()  # docs/api.md has these
    assert names - code_of(sections_about(message)) == set()


@pytest.mark.parametrize("enum", sorted(pb.DESCRIPTOR.enum_types_by_name))
def test_every_value_of_an_enum_is_there(enum: str) -> None:
    values = [value.name for value in pb.DESCRIPTOR.enum_types_by_name[enum].values if value.number]
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum).upper() + "_"
    text = next(section for section in SECTIONS if f"`{prefix}`" in section)
    assert {value.removeprefix(prefix) for value in values} - code_of(text) == set()


def test_methods_are_those_of_the_services() -> None:
    for file, name in ((pb.DESCRIPTOR, "EngineService"), (public_pb.DESCRIPTOR, "GenerationService")):
        methods = {method.name for method in file.services_by_name[name].methods}
        assert {name, *methods} - code_of(PAGE) == set()


def test_nothing_is_named_that_the_protos_do_not_have() -> None:
    """Names in the protos' form, in the sections about the engine's wire."""
    text = PAGE.partition("### Handshake")[2].partition("## Constants")[0]
    messages = pb.DESCRIPTOR.message_types_by_name
    fields = {field.name for message in messages.values() for field in message.fields}
    values = {value.name for enum in pb.DESCRIPTOR.enum_types_by_name.values() for value in enum.values}
    reasons = {error_reason(error.__new__(error)) for error in RequestError.__subclasses__()}
    statuses = {code.name for code in grpc.StatusCode} | reasons
    named = code_of(text)
    assert {name for name in named if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name)} - fields - SAMPLING.keys() == set()
    assert {name for name in named if re.fullmatch(r"([A-Z][a-z]+){2,}", name)} - set(messages) - {
        "GetEngineStatus",
        "GetTokenizer",
        "LoadAdapter",
        "SamplingOptions",
        "UnloadAdapter",
    } == set()
    upper = {name for name in named if re.fullmatch(r"[A-Z]{2,}(_[A-Z]+)*", name)}
    assert {name for name in upper if not any(value.endswith(name) for value in values)} - statuses == set()


def number(text: str) -> float:
    return float(text.partition(" ")[0].replace(",", ""))


def test_numbers_are_the_codes() -> None:
    table = PAGE.partition("\n## Constants\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+ \| (\d[^|]*) \| ([^|]+) \|$", table, re.M)
    assert len(rows) >= 15
    assert rows[0][0] == f"{engine_protocol.PROTOCOL_MAJOR}.{engine_protocol.PROTOCOL_MINOR}"
    for value, constants in rows[1:]:
        for path in CODE.findall(constants):
            module, *names = re.findall(r"(?:[a-z_]+\.)*[a-z_]+(?=\.[A-Z])|[A-Za-z_]+", path)
            found: object = importlib.import_module(module)
            for name in names:
                found = getattr(found, name)
            assert found == number(value), path


def test_the_example_of_columns_is_one() -> None:
    columns = {name: list(map(int, ids.split(", "))) for name, ids in re.findall(r"(\w+) \[([\d, ]+)\]", PAGE)}
    step = ParseDict(columns, pb.StepResult())
    assert len(step.handles) == len(step.token_counts) == len(step.start_indices) == len(step.epochs) == 3
    assert sum(step.token_counts) == len(step.token_ids)
