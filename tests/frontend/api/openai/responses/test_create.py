"""/v1/responses through OpenAI's own client. FakeEngine answers with the rendered conversation."""

import json
import struct

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from frontend.api.http.unknown_parameters import HEADER
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

EVENT = pydantic.TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True}


async def events_of(pair, **body):
    """Yields the events of a stream, numbered, each valid under the SDK's own type of its name."""
    number = 0
    async for event in streamed_events(pair, "/v1/responses", body):
        assert type(EVENT.validate_python(event)).model_fields["type"].annotation.__args__ == (event["type"],)
        assert event["sequence_number"] == number
        number += 1
        yield event


async def all_events(pair, **body):
    return [event async for event in events_of(pair, **body)]


async def test_response_repeats_numbers_as_they_were_sent(shared_client):
    answer = await shared_client.responses.create(model="fake", input="hi", temperature=0.7, top_p=0.12345678)
    assert answer.temperature == 0.7
    assert struct.pack("f", answer.top_p) == struct.pack("f", 0.12345678)


async def test_answer_is_a_response_object(shared_client, shared_pair):
    answer = await shared_client.responses.create(
        model="fake", input="hi", instructions="be", temperature=0.5, metadata={"a": "b"}, user="u"
    )
    Response.model_validate(answer.to_dict())
    text = "<system>be<user>hi<assistant>"
    assert (answer.output_text, answer.status, answer.object) == (text, "completed", "response")
    assert (answer.id[:5], answer.output[0].id[:4]) == ("resp_", "msg_")
    assert (answer.instructions, answer.temperature, answer.top_p) == ("be", 0.5, 1.0)
    assert (answer.metadata, answer.user, answer.to_dict()["store"]) == ({"a": "b"}, "u", False)
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (29, 30, 59)
    assert answer._request_id == answer.id
    assert shared_pair.engine.submissions[0].stops.max_tokens == 4096 - 29


async def test_client_s_own_id_names_the_response(shared_client):
    answer = await shared_client.responses.create(model="fake", input="hi", extra_headers={"x-request-id": "mine"})
    assert (answer.id, answer.output[0].id) == ("resp_mine", "msg_mine_0")


async def test_stream_builds_up_the_response(shared_pair):
    events = await all_events(shared_pair, input="hi")
    assert without_repeats([event["type"].removeprefix("response.") for event in events]) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    response = events[-1]["response"]
    assert text == "<user>hi<assistant>" == response["output"][0]["content"][0]["text"]
    assert events[0]["response"] | {"status": 0, "output": 0, "usage": 0, "completed_at": 0} == response | {
        "status": 0,
        "output": 0,
        "usage": 0,
        "completed_at": 0,
    }
    assert events[-2]["item"] == response["output"][0]


async def test_client_s_helper_for_streams_gets_the_same_response(shared_client):
    async with shared_client.responses.stream(model="fake", input="hi") as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_response()
    assert streamed.output_text == (await shared_client.responses.create(model="fake", input="hi")).output_text


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_text_and_calls_are_items_in_order(shared_pairs, stream):
    pair, client = await shared_pairs(ALL)
    body = {"input": f"<think>hm</think>Well.\n{CALL}{CALL}", "tools": [WEATHER]}
    if stream:
        events = await all_events(pair, **body)
        output = events[-1]["response"]["output"]
        kinds = without_repeats([event["type"].removeprefix("response.") for event in events])
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
        part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done"]
        assert kinds == [
            *("created", "in_progress"),
            *[kind.format("reasoning_text") for kind in [*part, "output_item.done"]],
            *[kind.format("output_text") for kind in [*part, "output_item.done"]],
            *[*call, "output_item.done"] * 2,
            "completed",
        ]
        indices = [event["output_index"] for event in events if "output_index" in event]
        assert (indices, set(indices)) == (sorted(indices), {0, 1, 2, 3})
    else:
        answer = await client.responses.create(model="fake", **body)
        Response.model_validate(answer.to_dict())
        output = answer.to_dict()["output"]
    reasoning, message, *calls = output
    assert (reasoning["type"], reasoning["content"][0]["text"], reasoning["summary"]) == ("reasoning", "hm", [])
    assert message["content"][0]["text"].strip() == "Well."
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Zürich"}] * 2
    assert len({call["call_id"] for call in calls}) == len({item["id"][:3] for item in output}) - 1 == 2
    assert {item["status"] for item in output} == {"completed"}


@pytest.mark.parametrize("tokens_per_step", [1, 64])
@pytest.mark.parametrize("summary", [None, "auto"])
async def test_deltas_add_up_to_the_done_events(shared_pairs, tokens_per_step, summary):
    pair, _ = await shared_pairs(ALL)
    pair.engine.tokens_per_step = tokens_per_step
    body = {"input": f"<think>hm</think>Well.\n{CALL}", "tools": [WEATHER], "reasoning": {"summary": summary}}
    texts, num_done = {}, 0
    for event in await all_events(pair, **body):
        index, kind = event.get("output_index"), event["type"]
        if kind == "response.output_item.added":
            texts[index] = event["item"].get("arguments", "")
        elif kind.endswith("part.added"):
            texts[index] += event["part"]["text"]
        elif kind.endswith(".delta"):
            texts[index] += event["delta"]
        elif kind.endswith(("_text.done", "arguments.done")):
            assert texts[index] == event.get("text", event.get("arguments"))
            num_done += 1
    assert num_done == 3


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
async def test_reasoning_tokens_do_not_depend_on_how_tokens_were_batched(shared_pairs, tokens_per_step):
    pair, client = await shared_pairs(ALL)
    pair.engine.tokens_per_step = tokens_per_step
    answer = await client.responses.create(model="fake", input="<think>hm</think>so")
    assert answer.usage.output_tokens_details.reasoning_tokens == len("<think>hm")
    answer = await client.responses.create(model="fake", input="so it is")
    assert answer.usage.output_tokens_details.reasoning_tokens == 0


async def test_reasoning_is_a_summary_on_request(shared_pairs):
    pair, _ = await shared_pairs(ALL)
    body = {"input": "<think>hm</think>so", "reasoning": {"summary": "auto"}}
    events = await all_events(pair, **body, include=["reasoning.encrypted_content"])
    reasoning, message = events[-1]["response"]["output"]
    assert (reasoning["summary"], "content" in reasoning) == ([{"type": "summary_text", "text": "hm"}], False)
    kinds = [event["type"] for event in events if "summary" in event["type"]]
    assert without_repeats([kind.removeprefix("response.reasoning_summary_") for kind in kinds]) == [
        *("part.added", "text.delta", "text.done", "part.done")
    ]
    turns, _ = await shared_pairs(TURNS)
    back = [{"type": "reasoning", "summary": [], "encrypted_content": reasoning["encrypted_content"]}, message]
    (*_, last) = await all_events(turns, input=back)
    assert last["response"]["output"][0]["content"][0]["text"] == "<assistant>so(hm)"


async def test_two_turns_of_a_tool_loop_reach_the_template_as_chat_does(shared_pairs):
    first = await (await shared_pairs(ALL))[1].responses.create(
        model="fake", input=f"<think>hm</think>Well.\n{CALL}", tools=[WEATHER]
    )
    call_id = first.output[-1].call_id
    conversation = [
        {"role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "how"}]},
        *first.output,
        {"type": "function_call_output", "call_id": call_id, "output": "sunny"},
        {"role": "user", "content": "thanks"},
    ]
    client = (await shared_pairs(TURNS))[1]
    answer = await client.responses.create(model="fake", input=conversation, instructions="You", tools=[WEATHER])
    called, answered = f"[{call_id} weather Zürich]", f"<tool>sunny={call_id} weather"
    assert answer.output_text == f"<system>You\nbe<user>how<assistant>Well.(hm){called}{answered}<user>thanks"


async def test_structured_output_is_enforced_and_parsed(shared_pairs):
    class Place(pydantic.BaseModel):
        city: str

    pair, client = await shared_pairs(ECHO)
    answer = await client.responses.parse(model="fake", input='{"city": "Rom"}', text_format=Place)
    assert answer.output_parsed == Place(city="Rom")
    assert answer.text.format.type == "json_schema"
    (grammar,) = json.loads(pair.engine.submissions[-1].grammar)["grammars"]
    assert grammar["json_schema"]["properties"]["city"]["type"] == "string"
    answer = await client.responses.create(model="fake", input="{}", text={"format": {"type": "json_object"}})
    assert pair.engine.submissions[-1].grammar
    await client.responses.create(model="fake", input="{}", text={"format": {"type": "text"}, "verbosity": "low"})
    assert not pair.engine.submissions[-1].grammar


@pytest.mark.parametrize("strict", [True, False])
async def test_objects_of_a_strict_text_have_no_members_but_those_they_name(shared_pairs, strict):
    pair, client = await shared_pairs(ECHO)
    schema = {"type": "object", "properties": {"to": {"properties": {"city": {"type": "string"}}}}}
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": strict}}
    await client.responses.create(model="fake", input="{}", text=text)
    (grammar,) = json.loads(pair.engine.submissions[-1].grammar)["grammars"]
    assert ("additionalProperties" in grammar["json_schema"]["properties"]["to"]) == strict


async def test_tools_that_are_no_functions_are_not_offered(shared_pairs):
    names = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{# <tool_call> #}"
    client = (await shared_pairs(names))[1]
    hosted = {"type": "web_search", "external_web_access": False}
    tools = [WEATHER, hosted, {"type": "namespace", "name": "agents", "tools": [WEATHER]}, hosted]
    response = await client.responses.with_raw_response.create(model="fake", input="x", tools=tools)
    answer = response.parse()
    assert answer.output_text == "weather;"
    assert [tool.name for tool in answer.tools] == ["weather"]
    assert response.headers[HEADER] == "tools.web_search, tools.namespace"


CHOICES = {
    "auto": ("auto", False),
    "required": ("required", True),
    "function": ({"type": "function", "name": "weather"}, True),
    "allowed": (
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        True,
    ),
}


@pytest.mark.parametrize("case", CHOICES)
async def test_tool_choice_is_enforced(shared_pairs, case):
    choice, enforced = CHOICES[case]
    pair, client = await shared_pairs(HERMES)
    answer = await client.responses.create(model="fake", input=CALL, tools=[WEATHER], tool_choice=choice)
    Response.model_validate(answer.to_dict())
    assert answer.output[0].name == "weather"
    assert bool(pair.engine.submissions[-1].grammar) == enforced


async def test_only_the_first_call_counts_without_parallel_calls(shared_pairs):
    client = (await shared_pairs(HERMES))[1]
    answer = await client.responses.create(model="fake", input=CALL + CALL, tools=[WEATHER], parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["function_call"]
    assert not answer.parallel_tool_calls


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("minimal", False), ("low", True)])
async def test_effort_and_tools_reach_the_template(shared_pairs, effort, thinks):
    template = "{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }} {{ tools | tojson }}{# <tool_call> #}"
    client = (await shared_pairs(template))[1]
    answer = await client.responses.create(
        model="fake", input="x", tools=[WEATHER, {"type": "function", "name": "f"}], reasoning={"effort": effort}
    )
    in_chat = {key: value for key, value in WEATHER.items() if key != "type"}
    tools = [{"type": "function", "function": in_chat}, {"type": "function", "function": {"name": "f"}}]
    assert answer.output_text == f"{effort} {thinks} {thinks} {json.dumps(tools)}"


@pytest.mark.parametrize("stream", [False, True])
async def test_cut_off_answer_is_incomplete(shared_pair, shared_client, stream):
    body = {"input": "hi", "max_output_tokens": 3}
    if stream:
        events = await all_events(shared_pair, **body)
        assert events[-1]["type"] == "response.incomplete"
        response = events[-1]["response"]
    else:
        response = (await shared_client.responses.create(model="fake", **body)).to_dict()
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "<us")


async def test_max_tokens_above_the_context_is_reduced_to_what_fits(shared_client, shared_pair):
    await shared_client.responses.create(model="fake", input="hi", max_output_tokens=100_000)
    assert shared_pair.engine.submissions[0].stops.max_tokens == 4096 - len("<user>hi<assistant>")


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_belong_to_the_text(shared_pairs, stream, tokens_per_step):
    pair, client = await shared_pairs(ALL)
    pair.engine.tokens_per_step = tokens_per_step
    body = {"input": "<think>hm</think>é", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    if stream:
        events = await all_events(pair, **body)
        response = events[-1]["response"]
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [row for event in deltas for row in event["logprobs"]] == response["output"][1]["content"][0]["logprobs"]
    else:
        response = (await client.responses.create(model="fake", **body)).to_dict()
        Response.model_validate(response)
    rows = response["output"][1]["content"][0]["logprobs"]
    assert b"".join(bytes(row["bytes"]) for row in rows).decode() == "é"
    assert all(len(row["top_logprobs"]) == 2 for row in rows)


@pytest.mark.parametrize("tokens_per_step", [1, 7, 500])
@pytest.mark.parametrize("before", ["", "<think>Oslo or Rome?</think>", CALL + "\n"])
async def test_logprobs_are_those_of_the_text_and_not_of_equal_text_around_it(
    shared_pairs, monkeypatch, before, tokens_per_step
):
    pair, client = await shared_pairs(ALL)
    pair.engine.tokens_per_step = tokens_per_step

    def number(step):  # one request: the log-probability of each token is its position in the answer
        step.logprobs.chosen[:] = [-(step.start_indices[0] + place) for place in range(len(step.logprobs.chosen))]
        return [step]

    monkeypatch.setattr(pair.engine, "rewrite_step", number)
    text = before + 'Rome<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    include = ["message.output_text.logprobs"]
    answer = await client.responses.create(model="fake", input=text, tools=[WEATHER], include=include)
    (message,) = (item for item in answer.output if item.type == "message")
    rows = message.content[0].logprobs
    assert [(row.token, -row.logprob) for row in rows] == [
        (char, len(before.encode()) + at) for at, char in enumerate("Rome")
    ]


async def test_tokens_of_the_input_are_counted(shared_client):
    count = await shared_client.responses.input_tokens.count(model="fake", input="hi", instructions="be")
    assert count.input_tokens == len("<system>be<user>hi<assistant>")


async def test_failure_inside_a_stream_is_an_error_and_a_failed_response(http_pair):
    http_pair.engine.step_interval_s = 0.001
    events = []
    async for event in events_of(http_pair, input="abc", ignore_eos=True, max_output_tokens=4000):
        if not events:
            await http_pair.engine.kill()
        events.append(event)
    *_, error, failed = events
    assert (error["type"], error["code"], error["error"]["code"]) == (
        "error",
        "engine_unavailable",
        "engine_unavailable",
    )
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}


async def test_client_raises_what_fails_inside_a_stream(http_pair, client):
    http_pair.engine.step_interval_s = 0.001
    stream = await client.responses.create(model="fake", input="abc", stream=True, extra_body={"ignore_eos": True})
    assert (await anext(stream)).type == "response.created"
    await http_pair.engine.kill()
    with pytest.raises(openai.APIError, match="engine"):
        [event async for event in stream]


BAD = [
    ({"input": []}, "input", "at least 1"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input", "4097|4096"),
    ({"input": "x" * 40_000}, "input", "maximum context length is"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input",
        r"input\[0\].content\[0\].*images",
    ),
    ({"input": [{"role": "robot", "content": "x"}]}, "input", r"input\[0\].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_reference.*store: false"),
    ({"input": [{"type": "web_search_call", "id": "1"}]}, "input", "'web_search_call'"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
    ({"input": "x", "conversation": "conv_1"}, "conversation", "stores no responses"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "stores no responses"),
    ({"input": "x", "background": True}, "background", "stores no responses"),
    ({"input": "x", "truncation": "auto"}, "truncation", "'disabled'"),
    ({"input": "x", "include": ["nothing"]}, "include", "'nothing'"),
    ({"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": "x", "tools": [{"name": "f"}]}, "tools", r"tools\[0\] needs a type"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools", r"tools\[0\] has no name"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "no tools"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "mcp"}}, "tool_choice", "must be"),
    ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
    ({"input": "x", "tools": [WEATHER]}, "tools", "not served with this model"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "needs a schema"),
    (
        {"input": "x", "text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
        "text.format",
        "text.format",
    ),
    ({"input": 5}, "input", "input must be a string or a list of objects"),
    ({"input": {"role": "user"}}, "input", "input must be a string or a list of objects"),
    ({"input": [{"role": "user", "content": "x"}, 5]}, "input", "input.1: Input should be an object"),
    ({"input": [{"role": "user", "content": 5}]}, "input", "input.0.content must be a string or a list of parts"),
    ({"input": "x", "temperature": 1000}, "temperature", "is 1000"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "greater than"),
    ({"input": "x", "top_logprobs": 21}, "top_logprobs", "is 21"),
    ({"input": "x", "stream": True, "min_tokens": 9, "max_output_tokens": 3}, "min_tokens", "more than the 3"),
]


@pytest.mark.parametrize(("body", "param", "words"), BAD)
async def test_bad_parameter_is_named(shared_client, body, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await shared_client.post("/responses", body=body, cast_to=object)
    assert caught.value.param == param


async def test_stored_responses_are_refused_by_name(shared_client):
    for call in (shared_client.responses.retrieve, shared_client.responses.delete, shared_client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="'resp_1': this server stores no responses"):
            await call("resp_1")
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        await shared_client.responses.input_items.list("resp_1")


async def test_other_model_is_not_found(shared_client):
    with pytest.raises(openai.NotFoundError) as caught:
        await shared_client.responses.create(model="gpt-4", input="x", stream=True)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("tokens_per_step", [1, 4, 500])
async def test_logprobs_leave_out_special_tokens_within_the_text_and_the_reasoning_before_it(
    shared_pairs, tokens_per_step
):
    pair, client = await shared_pairs(ALL)
    pair.engine.tokens_per_step = tokens_per_step
    answer = await client.responses.create(
        model="fake",
        input="<think>hm</think>Ro<|end|>me",
        include=["message.output_text.logprobs"],
        max_output_tokens=len("<think>hm</think>Ro.me"),
        extra_body={"ignore_eos": True},
    )
    _, message = answer.output
    assert message.content[0].text == "Rome"
    assert [row.token for row in message.content[0].logprobs] == list("Rome")
