"""Invalid requests: each gets its status and error details, and never reaches the engine."""

import hashlib
import math

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

INVALID = grpc.StatusCode.INVALID_ARGUMENT
MAX_LEN = 100


@pytest.fixture
async def small_pair(make_pair):
    return await make_pair(engine=FakeEngine(max_model_len=MAX_LEN))


async def refusal(call):
    """Returns the code, message, ErrorInfo reason and BadRequest fields of a failed call."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    status = await rpc_status.aio.from_call(FinishedCall(caught.value))
    info, fields = error_details_pb2.ErrorInfo(), []
    assert status.details[0].Unpack(info)
    assert info.domain == "chairlift"
    for detail in status.details[1:]:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            fields += [violation.field for violation in bad_request.field_violations]
    return caught.value.code(), caught.value.details(), info.reason, fields


class FinishedCall:
    """Adapts an AioRpcError to the interface that rpc_status expects."""

    def __init__(self, error):
        self._error = error

    async def code(self):
        return self._error.code()

    async def details(self):
        return self._error.details()

    async def trailing_metadata(self):
        return self._error.trailing_metadata()


def sampling(**values):
    return {"sampling": pb.SamplingOptions(**values)}


def stop(**values):
    return {"stop": pb.StopOptions(**values)}


def structured(**values):
    return {"structured_output": pb.StructuredOutput(**values)}


def chat(*turns):
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return {"text": None, "chat": pb.ChatPrompt(messages=messages)}


BAD = {
    "empty text": ({"text": ""}, "spec.text", "empty"),
    "no prompt": ({"text": None}, "spec.prompt", "exactly one of text, token_ids or chat"),
    "no ids": ({"text": None, "token_ids": pb.TokenIds()}, "spec.token_ids", "empty"),
    "ids too large": ({"text": None, "token_ids": pb.TokenIds(ids=[1, 258])}, "spec.token_ids", "258"),
    "no turns": (chat(), "spec.chat.messages", "at least 1"),
    "no role": (chat(("", "hi")), "spec.chat.messages", "role"),
    "too many turns": (chat(*[("u", "")] * 101), "spec.chat.messages", "101 messages, at most 100"),
    "id too long": ({"request_id": "x" * 129}, "spec.request_id", "129 characters, at most 128"),
    "salt too long": ({"cache_salt": "x" * 129}, "spec.cache_salt", "129"),
    "no answers": ({"num_answers": 0}, "spec.num_answers", "0"),
    "too many answers": ({"num_answers": 129}, "spec.num_answers", "at most 128"),
    "temperature negative": (sampling(temperature=-0.1), "spec.sampling.temperature", "-0.1"),
    "temperature nan": (sampling(temperature=math.nan), "spec.sampling.temperature", "nan"),
    "temperature inf": (sampling(temperature=math.inf), "spec.sampling.temperature", "inf"),
    "temperature high": (sampling(temperature=100.5), "spec.sampling.temperature", "at most 100"),
    "top_p zero": (sampling(top_p=0.0), "spec.sampling.top_p", "above 0"),
    "top_p high": (sampling(top_p=1.5), "spec.sampling.top_p", "at most 1"),
    "top_p nan": (sampling(top_p=math.nan), "spec.sampling.top_p", "nan"),
    "min_p negative": (sampling(min_p=-1), "spec.sampling.min_p", "at least 0"),
    "min_p high": (sampling(min_p=1.5), "spec.sampling.min_p", "at most 1"),
    "repetition zero": (sampling(repetition_penalty=0), "spec.sampling.repetition_penalty", "at least 0.1"),
    "repetition low": (sampling(repetition_penalty=1e-38), "spec.sampling.repetition_penalty", "1e-38, it must be"),
    "repetition high": (sampling(repetition_penalty=11), "spec.sampling.repetition_penalty", "at most 10"),
    "presence": (sampling(presence_penalty=2.5), "spec.sampling.presence_penalty", "at most 2"),
    "presence nan": (sampling(presence_penalty=math.nan), "spec.sampling.presence_penalty", "nan"),
    "frequency": (sampling(frequency_penalty=-3), "spec.sampling.frequency_penalty", "at least -2"),
    "bias id": (sampling(logit_bias={258: 1.0}), "spec.sampling.logit_bias", "258"),
    "bias value": (sampling(logit_bias={1: 101.0}), "spec.sampling.logit_bias", "at most 100"),
    "bias nan": (sampling(logit_bias={1: math.nan}), "spec.sampling.logit_bias", "nan"),
    "bias count": (sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "spec.sampling.logit_bias", "301"),
    "allowed id": (sampling(allowed_token_ids=[1, 258]), "spec.sampling.allowed_token_ids", "258"),
    "allowed ids": (sampling(allowed_token_ids=[1] * 65537), "spec.sampling.allowed_token_ids", "65537 entries"),
    "bad words": (sampling(bad_words=["x"] * 65), "spec.sampling.bad_words", "65 entries, at most 64"),
    "bad word long": (sampling(bad_words=["é" * 129]), "spec.sampling.bad_words", "258 bytes"),
    "bad word empty": (sampling(bad_words=["a", " "]), "spec.sampling.bad_words", "empty"),
    "no constraint": (structured(), "spec.structured_output", "json_schema, json_object, regex, choice, grammar"),
    "no object": (structured(json_object=False), "spec.structured_output.json_object", "false"),
    "no schema": (structured(json_schema=""), "spec.structured_output.json_schema", "empty"),
    "schema long": (
        structured(json_schema="x" * 65537),
        "spec.structured_output.json_schema",
        "65537 bytes, at most 65536",
    ),
    "schema no JSON": (structured(json_schema="{"), "spec.structured_output.json_schema", "not valid JSON"),
    "schema no object": (structured(json_schema="[]"), "spec.structured_output.json_schema", "must be a JSON object"),
    "schema keyword": (
        structured(json_schema='{"not": {"type": "null"}}'),
        "spec.structured_output.json_schema",
        "cannot enforce a schema with not",
    ),
    "schema unsatisfiable": (
        structured(json_schema='{"type": "integer", "minimum": 5, "maximum": 3}'),
        "spec.structured_output.json_schema",
        "minimum (5) is greater than maximum (3)",
    ),
    "no regex": (structured(regex=""), "spec.structured_output.regex", "empty"),
    "regex": (structured(regex="("), "spec.structured_output.regex", "unclosed group"),
    "regex look-ahead": (structured(regex="a(?=b)"), "spec.structured_output.regex", "look-around"),
    "no choices": (structured(choice=pb.Choices()), "spec.structured_output.choice", "at least one"),
    "choice empty": (structured(choice=pb.Choices(texts=["a", ""])), "spec.structured_output.choice", "empty"),
    "choices": (structured(choice=pb.Choices(texts=["a"] * 1001)), "spec.structured_output.choice", "1001 entries"),
    "choices long": (
        structured(choice=pb.Choices(texts=["x" * 65537])),
        "spec.structured_output.choice",
        "65537 bytes",
    ),
    "no grammar": (structured(grammar=""), "spec.structured_output.grammar", "empty"),
    "grammar": (structured(grammar="start: nothing"), "spec.structured_output.grammar", 'unknown name: "nothing"'),
    "grammar GBNF": (structured(grammar="root ::= nothing"), "spec.structured_output.grammar", "not GBNF"),
    "constraint without end": (
        {**structured(json_object=True), **stop(ignore_end_token=True)},
        "spec.stop.ignore_end_token",
        "complete",
    ),
    "max_tokens 0": (stop(max_tokens=0), "spec.stop.max_tokens", "at least 1"),
    "min over max": (stop(max_tokens=3, min_tokens=4), "spec.stop.min_tokens", "at most 3"),
    "stop texts": (stop(stop_texts=["x"] * 17), "spec.stop.stop_texts", "17 entries, at most 16"),
    "stop text long": (stop(stop_texts=["é" * 129]), "spec.stop.stop_texts", "258 bytes"),
    "stop text empty": (stop(stop_texts=["a", ""]), "spec.stop.stop_texts", "empty"),
    "stop ids": (stop(stop_token_ids=[0] * 65), "spec.stop.stop_token_ids", "65"),
    "stop id": (stop(stop_token_ids=[300]), "spec.stop.stop_token_ids", "300"),
    "logprobs": ({"output": pb.OutputOptions(top_logprobs=21)}, "spec.output.top_logprobs", "at most 20"),
    "prompt logprobs": ({"output": pb.OutputOptions(prompt_logprobs=21)}, "spec.output.prompt_logprobs", "at most 20"),
    "max_tokens 0, min_tokens 1": (
        {"output": pb.OutputOptions(echo=True), **stop(max_tokens=0, min_tokens=1)},
        "spec.stop.min_tokens",
        "at most 0",
    ),
    "parse without a chat": ({"output": pb.OutputOptions(parse=True)}, "spec.output.parse", "for answers to a chat"),
    "parse without text": (
        {**chat(("user", "hi")), "output": pb.OutputOptions(parse=True, text=False)},
        "spec.output.parse",
        "text is false",
    ),
    "parse with tools of no name": (
        {
            "text": None,
            "chat": pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], tools_json=["{}"]),
            "output": pb.OutputOptions(parse=True),
        },
        "spec.chat.tools_json",
        "no function with a name",
    ),
}


async def test_error_names_the_invalid_field_and_its_value(small_pair):
    stub = small_pair.stub()
    for case, (changes, field, text) in BAD.items():
        request = pb.GenerateRequest(spec=pb.GenerationSpec(**{"text": "abc", **changes}))
        code, details, reason, fields = await refusal(stub.Generate(request))
        assert (code, reason, fields) == (INVALID, "INVALID_REQUEST", [field]), case
        assert text in details, case
    assert not small_pair.engine.submissions


TOO_LONG = {
    "prompt": ({"text": "x" * MAX_LEN}, "spec.prompt", ["100 tokens", "prompt has 100"]),
    "prompt and answer": ({"text": "x" * 60, **stop(max_tokens=41)}, "spec.stop.max_tokens", ["60", "41", "101"]),
    "max_tokens alone": (stop(max_tokens=MAX_LEN), "spec.stop.max_tokens", ["max_tokens is 100"]),
    "max_tokens huge": (stop(max_tokens=2**32 - 1), "spec.stop.max_tokens", ["4294967295"]),
    "characters": ({"text": "x" * 801}, "spec.text", ["801 characters", "800"]),
    "three megabytes": ({"text": "x" * (3 << 20)}, "spec.text", ["3145728 characters", "800"]),
    "chat": (chat(("user", "x" * 797)), "spec.chat.messages", ["801 characters", "800"]),
    "ids": ({"text": None, "token_ids": pb.TokenIds(ids=[1] * 100)}, "spec.prompt", ["prompt has 100"]),
}


async def test_error_of_a_long_request_names_the_numbers(small_pair):
    stub = small_pair.stub()
    for case, (changes, field, texts) in TOO_LONG.items():
        request = pb.GenerateRequest(spec=pb.GenerationSpec(**{"text": "abc", **changes}))
        code, details, reason, fields = await refusal(stub.Generate(request))
        assert (code, reason, fields) == (INVALID, "REQUEST_TOO_LONG", [field]), case
        assert details.startswith("This model's maximum context length is 100 tokens"), case
        assert all(text in details for text in texts), case


async def test_largest_request_that_fits_is_served(small_pair):
    spec = pb.GenerationSpec(text="x" * 60, stop=pb.StopOptions(max_tokens=40))
    assert (await small_pair.stub().Generate(pb.GenerateRequest(spec=spec))).text == "x" * 40


async def test_min_tokens_beyond_the_context_are_refused(small_pair):
    spec = pb.GenerationSpec(text="x" * 95, stop=pb.StopOptions(min_tokens=6))
    code, details, _, fields = await refusal(small_pair.stub().Generate(pb.GenerateRequest(spec=spec)))
    assert (code, fields) == (INVALID, ["spec.stop.min_tokens"])
    assert "6" in details
    assert "5" in details


async def test_unknown_model_is_not_found(pair):
    stub = pair.stub()
    calls = [
        stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(model="other", text="a"))),
        stub.CountTokens(pb.CountTokensRequest(model="other", text="a")),
        stub.GetModel(pb.GetModelRequest(model="other")),
    ]
    for call in calls:
        code, details, reason, _ = await refusal(call)
        assert (code, reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
        assert "'other'" in details
        assert "'fake'" in details


async def test_last_of_two_prompts_on_the_wire_counts(pair):
    """A oneof cannot hold both; protobuf keeps the last one sent."""
    both = (
        pb.GenerationSpec(text="abc").SerializeToString()
        + pb.GenerationSpec(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    )
    answer = await pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec.FromString(both)))
    assert answer.finished.usage.num_prompt_tokens == 1


async def test_count_tokens_checks_its_prompt(small_pair):
    stub = small_pair.stub()
    code, details, _, fields = await refusal(stub.CountTokens(pb.CountTokensRequest()))
    assert (code, fields) == (INVALID, ["prompt"])
    assert "exactly one of text or chat" in details
    code, details, _, fields = await refusal(stub.CountTokens(pb.CountTokensRequest(text="x" * 801)))
    assert (code, fields) == (INVALID, ["text"])
    assert "801" in details


async def test_chat_without_template_is_refused(make_pair):
    files = {"tokenizer.json": byte_tokenizer_files()["tokenizer.json"]}
    pair = await make_pair(engine=FakeEngine(files=files))
    spec = pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")]))
    code, details, _, fields = await refusal(pair.stub().Generate(pb.GenerateRequest(spec=spec)))
    assert (code, fields) == (INVALID, ["spec.chat"])
    assert "template" in details


BAD_BYTES = {
    "invalid UTF-8 in text": b"\x0a\x04\x12\x02\xff\xfe",
    "invalid UTF-8 in a stop text": b"\x0a\x06\x32\x04\x1a\x02\xff\xfe",
    "cut off": b"\x0a\xff",
    "no message at all": b"\xff\xff\xff\xff",
}


async def test_unparsable_request_is_invalid(pair):
    channel, path = pair.channel(), "/chairlift.v1.GenerationService/"
    for case, request in BAD_BYTES.items():
        for call in (
            channel.unary_unary(path + "Generate")(request),
            channel.unary_stream(path + "StreamGenerate")(request).read(),
        ):
            code, details, reason, _ = await refusal(call)
            assert (code, reason) == (INVALID, "INVALID_REQUEST"), case
            assert "UTF-8" in details, case


TEXT = {
    "a prompt": ({"text": "abc"}, "spec.text"),
    "a conversation": (chat(("user", "hi")), "spec.chat.messages"),
    "a stop text": (stop(stop_texts=["x"]), "spec.stop.stop_texts"),
    "the answer": ({"output": pb.OutputOptions(text=True)}, "spec.output.text"),
    "an echo": ({"output": pb.OutputOptions(echo=True)}, "spec.output.echo"),
}


async def test_model_without_a_tokenizer_serves_token_ids_and_refuses_text(make_pair):
    pair = await make_pair(engine=FakeEngine(files={}))
    for case, (changes, field) in TEXT.items():
        prompt = {} if "text" in changes else {"token_ids": pb.TokenIds(ids=[1, 2])}
        spec = pb.GenerationSpec(**{name: value for name, value in (prompt | changes).items() if value is not None})
        code, details, reason, fields = await refusal(pair.stub().Generate(pb.GenerateRequest(spec=spec)))
        assert (code, reason, fields) == (INVALID, "INVALID_REQUEST", [field]), case
        assert details == "the model has no tokenizer: send token_ids, and take token_ids", case
    spec = pb.GenerationSpec(
        token_ids=pb.TokenIds(ids=[97, 98, 99]),
        stop=pb.StopOptions(max_tokens=3),
        output=pb.OutputOptions(token_ids=True, top_logprobs=1, echo=True, prompt_logprobs=0),
    )
    response = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert list(response.token_ids) == list(response.prompt.token_ids) == [97, 98, 99]
    assert len(response.prompt.logprobs.chosen) == 2
    assert (response.text, list(response.logprobs.chosen_bytes)) == ("", [b""] * 3)
    model = await pair.stub().GetModel(pb.GetModelRequest())
    assert not model.has_chat_template
    assert model.tokenizer_sha256 == hashlib.sha256(b"").hexdigest()
