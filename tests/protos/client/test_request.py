"""Keyword arguments become exactly the fields they name; what is not given is not set."""

import math
import re

import pytest
from google.protobuf.duration_pb2 import Duration

from chairlift.client.request import GenerationOptions, count_request, generation_spec
from chairlift.v1 import generation_service_pb2 as pb


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
        "ignore_end_token": True, "time_budget_s": 1.25,
        "allowed_token_ids": [1, 2], "bad_words": ["no"], "regex": "a+",
        "return_text": True, "return_token_ids": True, "top_logprobs": 2, "keep_special_tokens": True,
        "prompt_logprobs": 3, "echo": True, "parse": True,
        "ttft_s": 0.5, "inter_token_s": 0.025, "min_tokens_per_second": 40.0, "service_class": "c",
        "retry_ticket": b"t",
    }  # fmt: skip
    others = {"token_ids", "chat", *CHAT_OPTIONS, *CONSTRAINTS} - {"regex"}
    assert set(options) == set(GenerationOptions.__annotations__) - others
    spec = generation_spec("hello", options)
    assert spec == pb.GenerationSpec(
        model="m", text="hello", request_id="r", priority=-1, cache_salt="s", num_answers=3,
        sampling=pb.SamplingOptions(
            temperature=0.5, top_p=0.75, top_k=4, min_p=0.25, repetition_penalty=1.5, presence_penalty=0.5,
            frequency_penalty=-0.5, seed=7, logit_bias={3: -1.0}, allowed_token_ids=[1, 2], bad_words=["no"],
        ),
        stop=pb.StopOptions(
            max_tokens=9, min_tokens=2, stop_texts=["x"], stop_token_ids=[5], include_stop_text=True,
            ignore_end_token=True, time_budget=Duration(seconds=1, nanos=250_000_000),
        ),
        output=pb.OutputOptions(
            text=True, token_ids=True, top_logprobs=2, keep_special_tokens=True, prompt_logprobs=3, echo=True,
            parse=True,
        ),
        structured_output=pb.StructuredOutput(regex="a+"),
        latency_targets=pb.LatencyTargets(
            ttft=Duration(nanos=500_000_000), inter_token=Duration(nanos=25_000_000), min_tokens_per_second=40.0,
            service_class="c", retry_ticket=b"t",
        ),
    )  # fmt: skip


CHAT_OPTIONS = ("tools", "template_variables", "add_generation_prompt", "continue_final_message")
CONSTRAINTS = {
    "json_schema": ({"type": "string"}, pb.StructuredOutput(json_schema='{"type": "string"}')),
    "json_object": (True, pb.StructuredOutput(json_object=True)),
    "regex": ("a|b", pb.StructuredOutput(regex="a|b")),
    "choice": (["a", "b"], pb.StructuredOutput(choice=pb.Choices(texts=["a", "b"]))),
    "grammar": ('start: "a"', pb.StructuredOutput(grammar='start: "a"')),
}


def test_all_fields_of_the_proto_can_be_given():
    names = set(GenerationOptions.__annotations__) | {"text"}
    for message in (
        pb.SamplingOptions,
        pb.StopOptions,
        pb.OutputOptions,
        pb.StructuredOutput,
        pb.ChatPrompt,
        pb.LatencyTargets,
    ):
        for name in message.DESCRIPTOR.fields_by_name:
            known_as = {name, f"return_{name}", f"{name}_s", name.removesuffix("_json")}
            assert known_as & (names | {"messages"}), name
    for name in pb.GenerationSpec.DESCRIPTOR.fields_by_name:
        assert name in names | {"sampling", "stop", "output", "structured_output", "latency_targets"}


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_output_constraint_is_an_argument(name):
    value, expected = CONSTRAINTS[name]
    assert generation_spec("x", {name: value}).structured_output == expected


def test_schema_may_be_a_text_already():
    assert generation_spec("x", {"json_schema": "{}"}).structured_output.json_schema == "{}"


def test_tools_and_variables_belong_to_the_chat():
    call = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="1", name="f", arguments_json="{}")])
    options: GenerationOptions = {
        "chat": [("user", "hi"), call],
        "tools": [{"type": "function", "function": {"name": "ü"}}],
        "template_variables": {"enable_thinking": False},
        "continue_final_message": True,
    }
    assert generation_spec(None, options).chat == pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="hi"), call],
        tools_json=['{"type": "function", "function": {"name": "ü"}}'],
        template_variables_json='{"enable_thinking": false}',
        continue_final_message=True,
    )


def test_prompt_forms():
    assert generation_spec(None, {"token_ids": [1, 2]}).token_ids.ids == [1, 2]
    assert generation_spec(None, {"token_ids": []}).WhichOneof("prompt") == "token_ids"
    chat = generation_spec(None, {"chat": [("system", "be brief"), ("user", "hi")]}).chat
    assert [(turn.role, turn.content) for turn in chat.messages] == [("system", "be brief"), ("user", "hi")]


def test_turns_may_be_messages_of_openai():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    turns = [
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm", "refusal": None},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert list(generation_spec(None, {"chat": turns}).chat.messages) == [
        pb.ChatMessage(role="user", content="hi", name="Ann"),
        pb.ChatMessage(
            role="assistant",
            reasoning="hm",
            tool_calls=[pb.ToolCall(id="1", name="f", arguments_json='{"x": 1}')],
        ),
        pb.ChatMessage(role="tool", content="2", tool_call_id="1"),
    ]


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        (None, {}, "exactly one of text, token_ids, chat, not none"),
        ("x", {"token_ids": [1]}, "not text and token_ids"),
        ("x", {"max_token": 1}, "unknown argument 'max_token'; known: text, token_ids"),
        ("x", {"time_budget": 1}, "unknown argument 'time_budget'"),
        ("x", {"tools": []}, "tools needs a chat, and there is none"),
        ("x", {"regex": "a", "grammar": "b"}, "at most one of json_schema, .*, not regex and grammar"),
        ("x", {"choice": "ab"}, "choice is one text"),
        ("x", {"bad_words": "ab"}, "bad_words is one text"),
        ("x", {"stop_texts": "ab"}, "stop_texts is one text"),
        (None, {"token_ids": ["5"]}, "token_ids: 'str' object"),
        ([("user", "hi")], {}, "text is of type list; give token ids as token_ids, a chat as chat"),
        (None, {"chat": [{"content": "hi"}]}, "chat has {'content': 'hi'}; a turn has a role"),
        (None, {"chat": [{"role": "user", "content": [{"type": "text"}]}]}, "content is "),
        (None, {"chat": [{"role": "user", "audio": {}}]}, "a turn with 'audio', which is not known or not served"),
        (None, {"chat": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "tool_calls are not .*: KeyError"),
        (None, {"chat": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls are not .*: TypeError"),
        (None, {"chat": [("user", "hi", "there")]}, "chat has"),
        (None, {"chat": "hi"}, "chat has 'h'"),
        (None, {"chat": [("user", 5)]}, "content is 5"),
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
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("top_logprobs", -1),
        ("prompt_logprobs", -1),
        ("num_answers", -1),
        ("time_budget_s", math.inf),
        ("time_budget_s", math.nan),
        ("time_budget_s", 1e30),
        ("allowed_token_ids", [-1]),
    ],
)
def test_number_that_its_field_cannot_hold_is_named(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} is {value}")):
        generation_spec("x", {name: value})


def test_token_id_that_its_field_cannot_hold_is_named():
    with pytest.raises(ValueError, match=r"token_ids: .*-1"):
        generation_spec(None, {"token_ids": [1, -1]})


def test_whole_number_is_refused_with_its_range():
    with pytest.raises(ValueError, match="max_tokens is -1, it must be between 0 and 4294967295"):
        generation_spec("x", {"max_tokens": -1})


@pytest.mark.parametrize(("name", "value"), [("max_tokens", "5"), ("temperature", "hot"), ("time_budget_s", "2")])
def test_value_of_the_wrong_type_is_named(name, value):
    with pytest.raises(TypeError, match=f"{name} is '{value}'"):
        generation_spec("x", {name: value})


def test_schema_that_json_cannot_say_is_named():
    for schema in ({"a": {1, 2}}, {"a": math.nan}):
        with pytest.raises(ValueError, match="json_schema cannot be encoded as JSON"):
            generation_spec("x", {"json_schema": schema})
