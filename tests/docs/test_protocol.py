"""docs/protocol.md: every message, field and enum value of the engine's proto is there, and numbers are the code's."""

import importlib
import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import ParseDict

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service import engine_protocol
from chairlift.v1 import generation_service_pb2 as public_pb
from engine import server
from engine.listener import _SERVER_OPTIONS as ENGINE_OPTIONS
from frontend.app import _server_options
from frontend.config import FrontendConfig
from frontend.routing import connection as client
from frontend.routing.command_outbox import _MAX_SUBMIT_BYTES
from frontend.status import _TABLE

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
    text = PAGE.partition("### Handshake")[2].partition("## Numbers")[0]
    messages = pb.DESCRIPTOR.message_types_by_name
    fields = {field.name for message in messages.values() for field in message.fields}
    values = {value.name for enum in pb.DESCRIPTOR.enum_types_by_name.values() for value in enum.values}
    statuses = {code.name for code in grpc.StatusCode} | {row.reason for row in _TABLE.values()}
    named = code_of(text)
    assert {name for name in named if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", name)} - fields == set()
    assert {name for name in named if re.fullmatch(r"([A-Z][a-z]+){2,}", name)} - set(messages) - {
        "GetEngineStatus",
        "GetTokenizer",
    } == set()
    upper = {name for name in named if re.fullmatch(r"[A-Z]{2,}(_[A-Z]+)*", name)}
    assert {name for name in upper if not any(value.endswith(name) for value in values)} - statuses == set()


def number(text: str) -> float:
    return float(text.partition(" ")[0].replace(",", ""))


def test_numbers_are_the_codes() -> None:
    table = PAGE.partition("\n## Numbers\n")[2].partition("\n## ")[0]
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


def test_numbers_in_sentences_are_the_codes() -> None:
    config = FrontendConfig()
    public = dict(_server_options(config))
    frontend = dict(client._CHANNEL_OPTIONS)
    mib = 1 << 20
    said = {
        f"a message has at most {public['grpc.max_receive_message_length'] // mib} MiB",
        f"the server pings after {public['grpc.keepalive_time_ms'] // 1000} s",
        f"clients may every {public['grpc.http2.min_ping_interval_without_data_ms'] // 1000} s",
        f"with `--token-window` ({config.token_window})",
        f"for `--heartbeat-timeout` ({config.heartbeat_timeout_s:g} s, looked at twelve times",
        f"tries again after {client._MIN_BACKOFF_S} s, doubled up to {client.MAX_BACKOFF_S:g} s "
        f"({client._MAX_WAITING_BACKOFF_S} s while",
        f"every {server.HEARTBEAT_S * 1000:g} ms",
        f"no Hello within {server.HELLO_TIMEOUT_S:g} s",
        f"messages of up to {frontend['grpc.max_send_message_length'] // mib} MiB",
        f"of at most {_MAX_SUBMIT_BYTES // mib} MiB into one",
    }
    assert client._HEARTBEAT_CHECKS == 12
    assert dict(ENGINE_OPTIONS)["grpc.http2.min_ping_interval_without_data_ms"] == 1000
    text = " ".join(PAGE.split())
    assert [words for words in said if words not in text] == []


def test_the_example_of_columns_is_one() -> None:
    columns = {name: list(map(int, ids.split(", "))) for name, ids in re.findall(r"(\w+) \[([\d, ]+)\]", PAGE)}
    step = ParseDict(columns, pb.StepResult())
    assert len(step.handles) == len(step.token_counts) == len(step.start_indices) == len(step.epochs) == 3
    assert sum(step.token_counts) == len(step.token_ids)
