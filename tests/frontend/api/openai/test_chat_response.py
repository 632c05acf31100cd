"""/v1/chat/completions through OpenAI's own client. FakeEngine answers with the rendered conversation."""

import asyncio
import json

import openai
import pytest

from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.conversations import CALL
from tests.support.frontend.fake_engine import FakeEngine

HELLO = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
RENDERED = "<system>be<user>hi<assistant>"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


async def collect(stream):
    return [event async for event in stream]


def user(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def connect_to(shared_pairs):
    """connect_to(template) -> a client of a model with this chat template."""

    async def connect(template):
        return (await shared_pairs(template))[1]

    return connect


async def test_answer_has_a_message_a_reason_and_usage(shared_client):
    answer = await shared_client.chat.completions.create(model="fake", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", RENDERED, "stop")
    assert (choice.message.tool_calls, choice.logprobs) == (None, None)
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(RENDERED), len(RENDERED) + 1)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [({"times": 10**10}, "takes more than 256 MiB of memory"), ({"big": 9}, "takes more than 0.5 s of CPU time")],
)
async def test_expensive_template_variables_affect_only_their_request(connect_to, kwargs, says):
    client = await connect_to(
        "{{ messages[0].content }}{{ ('x' * times) | length if times }}{{ 10 ** (10 ** big) % 7 if big }}"
    )

    async def ask(**body):
        return await client.chat.completions.create(model="fake", messages=user("hi"), extra_body=body)

    bad = asyncio.create_task(ask(chat_template_kwargs=kwargs))
    for _ in range(5):
        assert (await ask()).choices[0].message.content == "hi"
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        await bad
    assert caught.value.body["param"] == "messages"
    assert (await ask()).choices[0].message.content == "hi"


async def test_streamed_deltas_add_up_to_the_answer(shared_client):
    stream = await shared_client.chat.completions.create(
        model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    first, *events, ending, last = await collect(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(event.choices[0].delta.content for event in events) == RENDERED
    assert ending.choices[0].finish_reason == "stop"
    assert (last.choices, last.usage.completion_tokens) == ([], len(RENDERED) + 1)


async def test_clients_own_helper_for_streams_gets_the_whole_message(shared_client):
    async with shared_client.chat.completions.stream(model="fake", messages=HELLO) as stream:
        async for _ in stream:
            pass
        completion = await stream.get_final_completion()
    assert completion.choices[0].message.content == RENDERED


async def test_answer_is_as_long_as_fits_if_nothing_limits_it(shared_client, shared_pair):
    await shared_client.chat.completions.create(model="fake", messages=HELLO)
    assert shared_pair.engine.submissions[0].stops.max_tokens == 4096 - len(RENDERED)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_limit_the_answer(shared_client, name):
    answer = await shared_client.chat.completions.create(model="fake", messages=HELLO, **{name: 3})
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (RENDERED[:3], "length")


async def test_parts_of_text_are_a_content(shared_client):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    answer = await shared_client.chat.completions.create(model="fake", messages=[{"role": "user", "content": parts}])
    assert answer.choices[0].message.content == "<user>h\ni<assistant>"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_rows(shared_client, stream):
    answer = await shared_client.chat.completions.create(
        model="fake", messages=user("é"), logprobs=True, top_logprobs=2, stream=stream
    )
    rows = []
    for event in await collect(answer) if stream else [answer]:
        if event.choices[0].logprobs is not None:
            rows += event.choices[0].logprobs.content
    assert b"".join(bytes(row.bytes) for row in rows).decode() == "<user>é<assistant><|end|>"
    assert [row.logprob for row in rows] == [-0.5] * len(rows)
    assert all(row.top_logprobs[0].bytes == row.bytes and len(row.top_logprobs) == 2 for row in rows)


@pytest.mark.parametrize("stream", [False, True])
async def test_n_answers_each_have_a_choice(shared_client, stream):
    answer = await shared_client.chat.completions.create(model="fake", messages=HELLO, n=3, stream=stream)
    if not stream:
        assert [choice.message.content for choice in answer.choices] == [RENDERED] * 3
        return
    texts, reasons = [""] * 3, []
    for event in await collect(answer):
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (texts, reasons) == ([RENDERED] * 3, ["stop"] * 3)


HERMES = "{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"


async def test_call_in_the_answer_is_a_tool_call(connect_to):
    client = await connect_to(HERMES)
    answer = await client.chat.completions.create(model="fake", messages=user("Well.\n" + CALL), tools=[WEATHER])
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Zürich"}
    assert call.id
    assert choice.message.content.strip() == "Well."
    assert choice.finish_reason == "tool_calls"


async def test_message_that_is_only_calls_has_no_content(connect_to):
    client = await connect_to(HERMES)
    answer = await client.chat.completions.create(model="fake", messages=user(CALL + CALL), tools=[WEATHER])
    assert answer.choices[0].message.content is None
    assert len({call.id for call in answer.choices[0].message.tool_calls}) == 2


async def test_calls_are_streamed(connect_to):
    client = await connect_to(HERMES)
    async with client.chat.completions.stream(
        model="fake", messages=user("Well.\n" + CALL + CALL), tools=[WEATHER]
    ) as stream:
        kinds = [event.type async for event in stream]
        completion = await stream.get_final_completion()
    calls = completion.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Zürich"}] * 2
    assert completion.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.delta") > 2


@pytest.mark.parametrize("stream", [False, True])
async def test_only_the_first_call_counts_without_parallel_calls(connect_to, stream):
    client = await connect_to(HERMES)
    answer = await client.chat.completions.create(
        model="fake", messages=user(CALL + CALL), tools=[WEATHER], parallel_tool_calls=False, stream=stream
    )
    if stream:
        deltas = [event.choices[0].delta for event in await collect(answer)]
        assert {call.index for delta in deltas for call in delta.tool_calls or ()} == {0}
    else:
        assert len(answer.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("options", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
async def test_without_tools_on_offer_a_call_is_text(connect_to, options):
    client = await connect_to(HERMES)
    answer = await client.chat.completions.create(model="fake", messages=user(CALL), **options)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (CALL, "stop")


async def test_tools_reach_the_template_as_they_came(connect_to):
    client = await connect_to("{{ tools | tojson }}{# <tool_call> #}")
    answer = await client.chat.completions.create(model="fake", messages=HELLO, tools=[WEATHER])
    assert answer.choices[0].message.content == json.dumps([WEATHER])


async def test_a_tool_without_a_type_is_a_function(connect_to):
    client = await connect_to("{{ tools | tojson }}{# <tool_call> #}")
    tools = [{"function": WEATHER["function"]}]
    answer = await client.chat.completions.create(model="fake", messages=HELLO, tools=tools)
    assert json.loads(answer.choices[0].message.content) == [WEATHER]


@pytest.mark.parametrize("thinking", ["hm", [{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]])
async def test_a_part_of_thinking_is_reasoning_of_the_assistant_and_text_of_others(connect_to, thinking):
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{{ m.reasoning_content }};{% endfor %}"
    client = await connect_to(template)
    content = [{"type": "thinking", "thinking": thinking, "closed": True}, {"type": "text", "text": "x"}]
    messages = [{"role": role, "content": content} for role in ("system", "assistant")]
    answer = await client.chat.completions.create(model="fake", messages=messages)
    assert answer.choices[0].message.content == "system:hm\nx|;assistant:x|hm;"


async def test_a_part_that_is_not_text_has_a_code(shared_client):
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(openai.BadRequestError) as caught:
        await shared_client.chat.completions.create(model="fake", messages=user(content))
    assert (caught.value.param, caught.value.code) == ("messages", "unsupported_value")


async def test_calls_and_results_of_earlier_turns_reach_the_template(connect_to):
    client = await connect_to(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{{ c.function.arguments.city }}{% endfor %}{{ m.tool_call_id }};{% endfor %}{# <tool_call> #}"
    )
    first = await client.chat.completions.create(model="fake", messages=user(CALL), tools=[WEATHER])
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}}
    messages = [
        {**first.choices[0].message.model_dump(), "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    answer = await client.chat.completions.create(model="fake", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "assistant:weatherRom;tool:sunnyc1;"


async def test_format_of_calls_can_be_set_by_flag(pair_of, connect):
    client = connect(await pair_of("{{ messages[0].content }}", tool_call_parser="hermes"))
    answer = await client.chat.completions.create(model="fake", messages=user(CALL), tools=[WEATHER])
    assert answer.choices[0].finish_reason == "tool_calls"


THINKING = "{{ messages[0].content }}{# </think> #}"


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_split_off(connect_to, stream):
    client = await connect_to(THINKING)
    answer = await client.chat.completions.create(model="fake", messages=user("<think>hm</think>so"), stream=stream)
    if stream:
        deltas = [event.choices[0].delta for event in await collect(answer)]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
    else:
        content, reasoning = answer.choices[0].message.content, answer.choices[0].message.reasoning_content
    assert (content.strip(), reasoning.strip()) == ("so", "hm")


@pytest.mark.parametrize("stream", [False, True])
async def test_usage_counts_the_reasoning_of_all_answers(connect_to, stream):
    client = await connect_to(THINKING)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    for text, num_tokens in (("<think>hm</think>so", 2 * len("<think>hm")), ("so it is", 0)):
        answer = await client.chat.completions.create(model="fake", messages=user(text), n=2, **options)
        usage = (await collect(answer))[-1].usage if stream else answer.usage
        assert usage.completion_tokens_details.reasoning_tokens == num_tokens


async def test_template_gets_variables(connect_to):
    client = await connect_to("{{ messages[0].content }}{{ mood }}{{ add_generation_prompt }}")
    answer = await client.chat.completions.create(
        model="fake", messages=user("hi"), extra_body={"chat_template_kwargs": {"mood": "gay"}}
    )
    assert answer.choices[0].message.content == "higayTrue"


VARIABLES = (
    "{{ messages[0].content }}:{{ reasoning_effort }}:{{ enable_thinking }}"
    "{{ '' if thinking == enable_thinking else '!' }}:"
    "{{ documents[0].title if documents }}"
)


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({}, "hi:::"),
        ({"reasoning_effort": None}, "hi:::"),
        ({"reasoning_effort": "high"}, "hi:high:True:"),
        ({"reasoning_effort": "none"}, "hi:none:False:"),
        ({"reasoning_effort": "minimal", "chat_template_kwargs": {"mood": 1}}, "hi:minimal:False:"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "hi:none:True!:"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max"}}, "hi:max:True:"),
        ({"documents": [{"title": "A", "text": "b"}]}, "hi:::A"),
    ],
)
async def test_effort_of_reasoning_and_documents_reach_the_template(connect_to, body, shown):
    client = await connect_to(VARIABLES)
    answer = await client.chat.completions.create(model="fake", messages=user("hi"), extra_body=body)
    assert answer.choices[0].message.content == shown


@pytest.mark.parametrize(
    ("comment", "role"), [("", "system"), ("{% if messages[0].role == 'developer' %}{% endif %}", "developer")]
)
async def test_developer_is_system_to_a_template_that_does_not_know_it(connect_to, comment, role):
    client = await connect_to("{{ messages[0].role }}" + comment)
    messages = [{"role": "developer", "content": "Be brief."}, *user("hi")]
    answer = await client.chat.completions.create(model="fake", messages=messages)
    assert answer.choices[0].message.content == role


async def test_final_message_is_continued(shared_client):
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    answer = await shared_client.chat.completions.create(
        model="fake", messages=messages, extra_body={"continue_final_message": True}
    )
    assert answer.choices[0].message.content == "<system>be<user>hi<assistant>Well, "


BAD = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "", "content": "x"}]}, "messages", "no role"),
    ({"messages": [{"content": "x"}]}, "messages", "required"),
    ({"messages": user("x" * 40_000)}, "messages", "maximum context length is"),
    ({"messages": user("x" * 4096)}, "messages", "maximum context length is"),
    (
        {"messages": user([{"type": "image_url", "image_url": {"url": "x"}}])},
        "messages",
        "parts of type text, not 'image_url'",
    ),
    ({"messages": [{"role": "user", "content": "x", "audio": {"id": "x"}}]}, "messages", "'audio'"),
    ({"messages": HELLO, "logprobs": 5}, "logprobs", "boolean"),
    ({"messages": HELLO, "top_logprobs": 5}, "top_logprobs", "needs logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21"),
    ({"messages": HELLO, "tools": [{"type": "retrieval"}]}, "tools", "type 'function'"),
    ({"messages": HELLO, "tools": [{"type": "function", "function": {}}]}, "tools", "name"),
    ({"messages": HELLO, "tools": [WEATHER]}, "tools", "not served with this model"),
    ({"messages": HELLO, "chat_template": "x"}, "chat_template", "not served"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "messages", "'messages'"),
    ({"messages": HELLO, "max_completion_tokens": 5000}, "max_tokens", "maximum context length is"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
async def test_bad_parameter_is_named(shared_client, body, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await shared_client.post("/chat/completions", body=body, cast_to=object)
    assert caught.value.param == param


async def test_model_without_a_template_refuses_chat(make_pair, connect):
    files = {"tokenizer.json": byte_tokenizer_files()["tokenizer.json"]}
    client = connect(await make_pair(engine=FakeEngine(files=files), http=True))
    with pytest.raises(openai.BadRequestError, match="no chat template") as caught:
        await client.chat.completions.create(model="fake", messages=HELLO)
    assert caught.value.param == "messages"
