"""/v1/messages through Anthropic's own client. FakeEngine answers with the rendered conversation."""

import json

import anthropic
import pydantic
import pytest
from anthropic.types import Message, ModelInfo, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.frontend.conversations import (
    ALL,
    CALL,
    ECHO,
    HERMES,
    SCHEMA,
    TURNS,
    streamed_events,
    without_repeats,
)
from tests.support.frontend.fake_engine import rejection

EVENT = pydantic.TypeAdapter(RawMessageStreamEvent)
WEATHER = {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}


def ask(text="hi", **body):
    return {"model": "fake", "max_tokens": 4096, "messages": [{"role": "user", "content": text}], **body}


async def events_of(pair, **body):
    """Yields the events of a stream, each valid under the SDK's own types."""
    async for event in streamed_events(pair, "/v1/messages", body):
        if event["type"] == "error":
            ErrorResponse.model_validate(event)
        elif event["type"] != "ping":
            EVENT.validate_python(event)
        yield event


async def all_events(pair, **body):
    return [event async for event in events_of(pair, **body)]


def shape(events):
    return without_repeats([event.get("delta", {}).get("type") or event["type"] for event in events])


async def test_answer_is_a_message(shared_client, shared_pair):
    answer = await shared_client.messages.create(**ask(system="be", extra_body={"temperature": 0.5, "top_k": 3}))
    Message.model_validate(answer.to_dict())
    (block,) = answer.content
    assert (block.type, block.text) == ("text", "<system>be<user>hi<assistant>")
    assert (answer.role, answer.model) == ("assistant", "fake")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    usage = answer.usage  # FakeEngine finds one token of every prompt in its cache
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (28, 1, 30)
    assert answer.id.removeprefix("msg_") == answer._request_id.removeprefix("req_")
    sampling = shared_pair.engine.submissions[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)


async def test_stream_builds_up_the_message(shared_pair, shared_client):
    events = await all_events(shared_pair, **ask())
    assert shape(events) == [
        *("message_start", "ping", "content_block_start", "text_delta", "content_block_stop", "message_delta"),
        "message_stop",
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == len("<user>hi<assistant>") - 1
    async with shared_client.messages.stream(**ask()) as stream:
        assert "".join([text async for text in stream.text_stream]) == "<user>hi<assistant>"
        streamed = await stream.get_final_message()
    whole = await shared_client.messages.create(**ask())
    assert (streamed.content[0].text, streamed.stop_reason) == (whole.content[0].text, whole.stop_reason)
    assert streamed.usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking_text_and_calls_are_blocks_in_order(shared_pairs, stream):
    pair, client = await shared_pairs(ALL)
    body = ask(f"<think>hm</think>Well.\n{CALL}{CALL}", tools=[WEATHER])
    if stream:
        kinds = shape(await all_events(pair, **body))
        assert kinds == [
            *("message_start", "ping"),
            *("content_block_start", "thinking_delta", "signature_delta", "content_block_stop"),
            *("content_block_start", "text_delta", "content_block_stop"),
            *("content_block_start", "input_json_delta", "content_block_stop") * 2,
            *("message_delta", "message_stop"),
        ]
        async with client.messages.stream(**body) as streamed:
            answer = await streamed.get_final_message()
    else:
        answer = await client.messages.create(**body)
        Message.model_validate(answer.to_dict())
    thinking, text, *calls = answer.content
    assert (thinking.thinking, text.text.strip(), bool(thinking.signature)) == ("hm", "Well.", True)
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Zürich"})] * 2
    assert len({call.id for call in calls}) == 2
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details.thinking_tokens == len("<think>hm")


async def test_two_turns_of_a_tool_loop_reach_the_template_as_chat_does(shared_pairs):
    first = await (await shared_pairs(ALL))[1].messages.create(
        **ask(f"<think>hm</think>Well.\n{CALL}", tools=[WEATHER])
    )
    call_id = first.content[-1].id
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": [{"type": "text", "text": "sunny"}], **cached}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how", **cached}]},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, {"type": "text", "text": "thanks"}]},
    ]
    client = (await shared_pairs(TURNS))[1]
    system = [{"type": "text", "text": "You", **cached}, {"type": "text", "text": "be"}]
    answer = await client.messages.create(
        model="fake", max_tokens=999, messages=messages, system=system, tools=[{**WEATHER, **cached}]
    )
    called, answered = f"[{call_id} weather Zürich]", f"<tool>sunny={call_id} weather"
    assert answer.content[0].text == f"<system>You\nbe<user>how<assistant>Well.(hm){called}{answered}<user>thanks"


async def test_turns_of_a_tool_runner_have_the_whole_conversation(shared_pairs):
    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        return f"sunny in {city}"

    client = (await shared_pairs(TURNS))[1]
    runner = client.beta.messages.tool_runner(**ask(CALL, system="be"), tools=[weather], max_iterations=2)
    first, second = [message async for message in runner]
    call_id = first.content[-1].id
    called, answered = f"[{call_id} weather Zürich]", f"<tool>sunny in Zürich={call_id} weather"
    text = "".join(block.text for block in second.content if block.type == "text")
    assert text == f"<system>be<user><assistant><system>be<user>{called}{answered}"


async def test_thinking_that_is_not_shown_comes_back_by_its_signature(shared_pairs):
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    first = await (await shared_pairs(ALL))[1].messages.create(**ask("<think>hm</think>so", thinking=thinking))
    assert first.content[0].thinking == ""
    messages = [{"role": "assistant", "content": first.content}, {"role": "user", "content": "x"}]
    answer = await (await shared_pairs(TURNS))[1].messages.create(model="fake", max_tokens=99, messages=messages)
    assert answer.content[0].text == "<assistant>so(hm)<user>x"


async def test_final_assistant_message_is_continued(shared_client):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    answer = await shared_client.messages.create(model="fake", max_tokens=99, messages=messages)
    assert answer.content[0].text == "<user>hi<assistant>Well, "


async def test_structured_output_is_enforced_and_parsed(shared_pairs):
    class Place(pydantic.BaseModel):
        city: str

    pair, client = await shared_pairs(ECHO)
    answer = await client.messages.parse(**ask('{"city": "Rom"}'), output_format=Place)
    assert answer.parsed_output == Place(city="Rom")
    (grammar,) = json.loads(pair.engine.submissions[-1].grammar)["grammars"]
    assert grammar["json_schema"]["properties"]["city"]["type"] == "string"


CHOICES = {
    "auto": ({"type": "auto"}, False),
    "any": ({"type": "any"}, True),
    "tool": ({"type": "tool", "name": "weather"}, True),
}


@pytest.mark.parametrize("case", CHOICES)
async def test_tool_choice_is_enforced(shared_pairs, case):
    choice, enforced = CHOICES[case]
    pair, client = await shared_pairs(HERMES)
    answer = await client.messages.create(**ask(CALL, tools=[WEATHER], tool_choice=choice))
    assert (answer.content[0].name, answer.stop_reason) == ("weather", "tool_use")
    assert bool(pair.engine.submissions[-1].grammar) == enforced


async def test_tool_choice_can_disable_tools_and_parallel_calls(shared_pairs):
    client = (await shared_pairs(HERMES))[1]
    one = {"type": "auto", "disable_parallel_tool_use": True}
    answer = await client.messages.create(**ask(CALL + CALL, tools=[WEATHER], tool_choice=one))
    assert len(answer.content) == 1
    answer = await client.messages.create(**ask(CALL, tools=[WEATHER], tool_choice={"type": "none"}))
    assert answer.content[0].text == CALL


async def test_thinking_effort_and_tools_reach_the_template(shared_pairs):
    template = "{{ enable_thinking }} {{ thinking }} {{ reasoning_effort }} {{ tools | tojson }}{# <tool_call> #}"
    client = (await shared_pairs(template))[1]
    options = {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}
    answer = await client.messages.create(**ask(tools=[WEATHER], **options))
    function = {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}
    assert answer.content[0].text == f"False False low {json.dumps([{'type': 'function', 'function': function}])}"


ENDS = {
    "max_tokens": ({"max_tokens": 3}, ("max_tokens", None), "<us"),
    "stop_sequence": ({"stop_sequences": ["x", "hi"]}, ("stop_sequence", "hi"), "<user>"),
    "context": ({"ignore_eos": True}, ("model_context_window_exceeded", None), "<user>hi"),
}


@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_reason_names_the_cause_of_the_end(shared_pairs, case, stream):
    options, end, beginning = ENDS[case]
    pair, client = await shared_pairs()
    pair.engine.tokens_per_step = 64
    if stream:
        events = await all_events(pair, **ask(**options))
        delta = events[-2]["delta"]
        assert (delta["stop_reason"], delta["stop_sequence"]) == end
    else:
        ours = {"extra_body": {"ignore_eos": True}} if "ignore_eos" in options else options
        answer = await client.messages.create(**ask(**ours))
        assert (answer.stop_reason, answer.stop_sequence) == end
        assert answer.content[0].text.startswith(beginning)


async def test_incomplete_call_has_its_complete_arguments(shared_pairs):
    client = (await shared_pairs(HERMES))[1]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "street": "Via'
    answer = await client.messages.create(**ask(call + " Appia", tools=[WEATHER]))
    assert answer.content[0].input["city"] == "Rom"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r'{"x": 1e999, "y": [-1e999, 1.5]}', {"x": None, "y": [None, 1.5]}),
        (r'{"x": "a\ud83d", "y": 1}', {"x": "a\ufffd", "y": 1}),
        (r'{"x": "\ud83d\ude00", "\ude00": "\\ud83d"}', {"x": "\U0001f600", "\ufffd": "\\ud83d"}),
    ],
)
async def test_arguments_that_json_cannot_hold_are_replaced(shared_pairs, written, read):
    client = (await shared_pairs(HERMES))[1]
    call = f'<tool_call>\n{{"name": "weather", "arguments": {written}}}\n</tool_call>'
    answer = await client.messages.create(**ask(call, tools=[WEATHER]))
    assert [block.input for block in answer.content if block.type == "tool_use"][-1] == read


async def test_tokens_are_counted(shared_client):
    count = await shared_client.messages.count_tokens(model="fake", messages=ask()["messages"], system="be")
    assert count.input_tokens == len("<system>be<user>hi<assistant>")


async def test_key_may_be_the_client_s_own(make_pair, connect):
    pair = await make_pair(http=True, api_key=("secret",))
    assert (await connect(pair, api_key="secret").messages.create(**ask())).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        await connect(pair, api_key="wrong").messages.create(**ask())
    error = ErrorResponse.model_validate(caught.value.body)
    assert (error.error.type, error.request_id) == ("authentication_error", caught.value.request_id)


BAD = [
    ({"messages": []}, "at least 1"),
    ({"messages": ask()["messages"] * 4097}, "4096"),
    ({"max_tokens": None}, "max_tokens"),
    ({"system": 5}, "system must be a string or a list of objects"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role is 'robot'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        r"messages\[0\].content\[0\].*'image'",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "needs tool_use_id"),
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        r"tools\[0\] has the type 'web_search_20250305'",
    ),
    ({"tools": [{"name": "f"}]}, r"tools\[0\] needs an input_schema"),
    ({"tool_choice": {"type": "any"}}, "no tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "f"}}, "'f'"),
    ({"tools": [WEATHER]}, "not served with this model"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not served"),
    ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread is not served"),
    ({"compaction": {"type": "summarize"}}, "compaction is not served"),
    ({"temperature": 1000}, "temperature is 1000"),
    ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
    (
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        "prompt is too long: This model's maximum context length",
    ),
]


@pytest.mark.parametrize(("body", "words"), BAD)
async def test_bad_parameter_is_named(shared_client, body, words):
    with pytest.raises(anthropic.BadRequestError, match=words) as caught:
        await shared_client.post("/v1/messages", body={**ask(), **body}, cast_to=object)
    error = ErrorResponse.model_validate(caught.value.body)
    assert (error.error.type, error.request_id) == ("invalid_request_error", caught.value.request_id)


async def test_models_are_listed_and_found(shared_client):
    (model,) = [model async for model in shared_client.models.list()]
    ModelInfo.model_validate(model.to_dict())
    assert (model.id, model.display_name, model.max_input_tokens) == ("fake", "fake", 4096)
    assert await shared_client.models.retrieve("fake") == model


async def test_other_model_and_other_path_are_not_found(shared_client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        await shared_client.messages.create(**{**ask(), "model": "claude"}, stream=True)
    assert caught.value.type == "not_found_error"
    with pytest.raises(anthropic.NotFoundError) as caught:
        await shared_client.post("/v1/messages/batches", body={}, cast_to=object)
    ErrorResponse.model_validate(caught.value.body)


async def test_full_queue_is_a_rate_limit_with_a_time_to_wait(http_pair, client):
    http_pair.engine.rejections = [rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "full", retry_after_s=2)]
    with pytest.raises(anthropic.RateLimitError) as caught:
        await client.messages.create(**ask(), stream=True)
    assert caught.value.type == "rate_limit_error"
    assert 2 <= int(caught.value.response.headers["retry-after"]) <= 4


async def test_expired_call_is_a_timeout_that_clients_do_not_retry(make_pair, connect):
    pair = await make_pair(http=True)
    pair.engine.pause()
    with pytest.raises(anthropic.GatewayTimeoutError) as caught:
        await connect(pair, max_retries=2).messages.create(**ask(), extra_headers={"x-request-timeout": "0.2"})
    assert caught.value.type == "timeout_error"
    assert len(pair.engine.submissions) <= 1


async def test_failure_inside_a_stream_is_an_error_event(http_pair):
    http_pair.engine.step_interval_s = 0.001
    async for event in events_of(http_pair, **ask(ignore_eos=True)):
        if event["type"] == "message_start":
            await http_pair.engine.kill()
    error = event  # the last one
    assert (error["type"], error["error"]["type"]) == ("error", "overloaded_error")
