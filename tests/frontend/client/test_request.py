"""Keyword arguments become exactly the fields they name; what is not given is not set."""

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.client.request import GenerationOptions, count_request, generation_spec


def test_only_what_is_given_is_set():
    spec = generation_spec("hello", {})
    assert spec == pb.GenerationSpec(
        text="hello", sampling=pb.SamplingOptions(), stop=pb.StopOptions(), output=pb.OutputOptions()
    )


def test_zero_and_none_differ():
    spec = generation_spec("hello", {"temperature": 0.0, "seed": 0, "top_k": None, "return_text": False})
    assert spec.sampling.HasField("temperature")
    assert spec.sampling.HasField("seed")
    assert not spec.sampling.HasField("top_k")
    assert spec.output.HasField("text")
    assert not spec.output.text


def test_every_option_reaches_the_field_of_its_name():
    options: GenerationOptions = {
        "model": "m", "request_id": "r", "priority": -1, "cache_salt": "s", "num_answers": 3,
        "temperature": 0.5, "top_p": 0.75, "top_k": 4, "min_p": 0.25, "repetition_penalty": 1.5,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "seed": 7, "logit_bias": {3: -1.0},
        "max_tokens": 9, "min_tokens": 2, "stop_texts": ["x"], "stop_token_ids": [5], "include_stop_text": True,
        "ignore_end_token": True,
        "return_text": True, "return_token_ids": True, "top_logprobs": 2, "keep_special_tokens": True,
    }  # fmt: skip
    assert set(options) == set(GenerationOptions.__annotations__) - {"token_ids", "chat"}
    spec = generation_spec("hello", options)
    assert spec == pb.GenerationSpec(
        model="m", text="hello", request_id="r", priority=-1, cache_salt="s", num_answers=3,
        sampling=pb.SamplingOptions(
            temperature=0.5, top_p=0.75, top_k=4, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, seed=7, logit_bias={3: -1.0},
        ),
        stop=pb.StopOptions(
            max_tokens=9, min_tokens=2, stop_texts=["x"], stop_token_ids=[5], include_stop_text=True,
            ignore_end_token=True,
        ),
        output=pb.OutputOptions(text=True, token_ids=True, top_logprobs=2, keep_special_tokens=True),
    )  # fmt: skip


def test_all_fields_of_the_proto_can_be_given():
    names = set(GenerationOptions.__annotations__) | {"text"}
    for message in (pb.SamplingOptions, pb.StopOptions):
        assert names.issuperset(message.DESCRIPTOR.fields_by_name)
    for name in pb.OutputOptions.DESCRIPTOR.fields_by_name:
        assert name in names or f"return_{name}" in names
    for name in pb.GenerationSpec.DESCRIPTOR.fields_by_name:
        assert name in names | {"sampling", "stop", "output"}


def test_prompt_forms():
    assert generation_spec(None, {"token_ids": [1, 2]}).token_ids.ids == [1, 2]
    assert generation_spec(None, {"token_ids": []}).WhichOneof("prompt") == "token_ids"
    chat = generation_spec(None, {"chat": [("system", "be brief"), ("user", "hi")]}).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, {}, "exactly one of text, token_ids, chat, not none"),
        ("x", {"token_ids": [1]}, "not text and token_ids"),
        ("x", {"max_token": 1}, "unknown argument 'max_token'; known: text, token_ids"),
    ],
)
def test_mistakes_are_type_errors(text, options, says):
    with pytest.raises(TypeError, match=says):
        generation_spec(text, options)


def test_count_request():
    assert count_request("x", None, "m", True) == pb.CountTokensRequest(text="x", model="m", return_token_ids=True)
    assert count_request(None, [("user", "x")], None, False).chat.messages[0].content == "x"
    for text, chat in ((None, None), ("x", [("user", "x")])):
        with pytest.raises(TypeError, match="exactly one"):
            count_request(text, chat, None, False)


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", -1), ("seed", -1), ("seed", 2**64), ("top_logprobs", -1), ("num_answers", -1)]
)
def test_number_that_its_field_cannot_hold_is_named(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        generation_spec("x", {name: value})
