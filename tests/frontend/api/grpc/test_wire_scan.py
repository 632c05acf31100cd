"""Fields of gRPC requests are counted before the request is parsed."""

import pytest
from google.protobuf.message import DecodeError

from chairlift.service.sampling_fields import SAMPLING, STOPPING
from chairlift.v1 import generation_service_pb2 as pb
from frontend import limits
from frontend.api.grpc.wire_scan import MalformedMessageError, check_counts
from frontend.errors import InvalidRequest
from frontend.slices import at_once

KIND = pb.GenerateRequest.DESCRIPTOR


def scan(data):
    at_once(check_counts(data, KIND))


def spec(**fields):
    return pb.GenerateRequest(spec=pb.GenerationSpec(**fields)).SerializeToString()


def chat(**fields):
    return spec(chat=pb.ChatPrompt(**fields))


def sampling(**fields):
    return spec(sampling=pb.SamplingOptions(**fields))


def stop(**fields):
    return spec(stop=pb.StopOptions(**fields))


def most_entries(name):
    return {**SAMPLING, **STOPPING}[name].rule.max_entries


COUNTED = {
    "token ids": (lambda n: spec(token_ids=pb.TokenIds(ids=[70_000] * n)), limits.MAX_TOKEN_IDS, "spec.token_ids.ids"),
    "messages": (lambda n: chat(messages=[pb.ChatMessage()] * n), limits.MAX_MESSAGES, "spec.chat.messages"),
    "tools": (lambda n: chat(tools_json=["{}"] * n), limits.MAX_TOOLS, "spec.chat.tools_json"),
    "calls": (
        lambda n: chat(messages=[pb.ChatMessage(tool_calls=[pb.ToolCall()] * n)]),
        limits.MAX_TOOL_CALLS,
        "spec.chat.messages.tool_calls",
    ),
    "biases": (
        lambda n: sampling(logit_bias=dict.fromkeys(range(n), 1.0)),
        most_entries("logit_bias"),
        "spec.sampling.logit_bias",
    ),
    "allowed": (
        lambda n: sampling(allowed_token_ids=range(n)),
        most_entries("allowed_token_ids"),
        "spec.sampling.allowed_token_ids",
    ),
    "stop texts": (
        lambda n: stop(stop_texts=["a"] * n),
        most_entries("stop_texts"),
        "spec.stop.stop_texts",
    ),
    "stop ids": (
        lambda n: stop(stop_token_ids=[300] * n),
        most_entries("stop_token_ids"),
        "spec.stop.stop_token_ids",
    ),
}


@pytest.mark.parametrize("name", COUNTED)
def test_maximum_number_passes_and_one_more_is_refused_by_name(name):
    make, most, field = COUNTED[name]
    scan(make(most))
    with pytest.raises(InvalidRequest, match=rf"has {most + 1} entries or more, at most {most}") as caught:
        scan(make(most + 1))
    assert caught.value.field == field


TEXTS = {
    "spec.text": lambda text: spec(text=text),
    "spec.chat.messages.content": lambda text: chat(messages=[pb.ChatMessage(content=text)]),
}


@pytest.mark.parametrize("field", TEXTS)
def test_a_text_longer_than_any_that_is_accepted_is_refused_by_name(field):
    most = limits.MAX_TEXT_BYTES
    scan(TEXTS[field]("é" * (most // 2)))
    with pytest.raises(InvalidRequest, match=f"has {most + 2} bytes of UTF-8, at most {most} are allowed") as caught:
        scan(TEXTS[field]("é" * (most // 2 + 1)))
    assert caught.value.field == field


def test_all_fields_together_are_bounded():
    parts = [pb.GenerateRequest(spec=pb.GenerationSpec(model="a")).SerializeToString()] * limits.MAX_WIRE_FIELDS
    with pytest.raises(InvalidRequest, match="more than 32768 fields"):
        scan(b"".join(parts))  # one spec in many parts, which protobuf puts together
    with pytest.raises(InvalidRequest, match="more than 32768 fields"):
        scan(b"\xf8\x07\x01" * (limits.MAX_WIRE_FIELDS + 1))  # fields that nobody knows


def test_unpacked_ids_are_counted_as_fields():
    data = b"\x08\x01" * (limits.MAX_WIRE_FIELDS + 1)
    with pytest.raises(InvalidRequest, match="fields"):
        at_once(check_counts(data, pb.TokenIds.DESCRIPTOR))


def test_an_ordinary_request_passes():
    scan(pb.GenerateRequest().SerializeToString())
    scan(spec(text="x" * 100_000))
    scan(chat(messages=[pb.ChatMessage(role="user", content="hello", tool_calls=[pb.ToolCall(id="a")])] * 1000))
    scan(sampling(temperature=0.5, seed=2**64 - 1, logit_bias={2**32 - 1: -1.0}))


BROKEN = [
    b"\x0a",
    b"\x0a\x05ab",
    b"\x0a\x04\x12\x05abcd",
    b"\x0f\x00",
    b"\xff" * 20,
    b"\x0a\xff\xff\xff\xff\xff\x01",
    b"\x0d\x00",
]


@pytest.mark.parametrize("data", BROKEN)
def test_invalid_message_is_not_scanned_to_its_end(data):
    with pytest.raises(DecodeError):
        pb.GenerateRequest.FromString(data)
    with pytest.raises(MalformedMessageError):
        scan(data)


def test_a_scan_can_be_interrupted():
    data = chat(messages=[pb.ChatMessage(role="u")] * 4000)
    assert sum(1 for _ in check_counts(data, KIND)) >= 8000 // 64
    ids = spec(token_ids=pb.TokenIds(ids=[70_000] * (1 << 20)))
    assert sum(1 for _ in check_counts(ids, KIND)) >= len(ids) >> 18
