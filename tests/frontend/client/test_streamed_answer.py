"""State of a streamed answer in both clients: the prompt, its tool calls, its timing."""

import json

import pytest

from chairlift.client.streamed_answer import StreamedAnswer
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

TEMPLATE = "{{ messages[0].content }}{# <tool_call> </think> #}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
REQUEST = {
    "chat": [("user", "<think>hm</think>Well." + CALL * 2)],
    "tools": [TOOL],
    "parse": True,
    "echo": True,
    "prompt_logprobs": 1,
    "num_answers": 2,
}


@pytest.fixture
async def target(make_pair):
    engine = FakeEngine(files=byte_tokenizer_files(TEMPLATE))
    return f"127.0.0.1:{(await make_pair(engine=engine)).app.port}"


async def test_stream_has_prompt_calls_and_timing(client):
    async with client.stream(**REQUEST) as stream:
        chunks = [chunk async for chunk in stream]
    assert stream.started.prompt.text == REQUEST["chat"][0][1]
    assert len(stream.started.prompt.logprobs.chosen) == stream.started.num_prompt_tokens - 1
    assert [(call.name, json.loads(call.arguments_json)) for call in stream.tool_calls] == [
        ("weather", {"city": "Rom"})
    ] * 2
    assert [len(calls) for _, calls in sorted(stream.all_tool_calls.items())] == [2, 2]
    assert "".join(chunk.reasoning for chunk in chunks if chunk.answer_index == 0) == "hm"
    assert "".join(chunk.text for chunk in chunks if chunk.answer_index == 1) == "Well."
    assert stream.finished.timing.total.ToNanoseconds() > 0


async def test_unary_answer_has_the_same(client):
    answer = await client.generate(**REQUEST)
    assert (answer.text, answer.reasoning, len(answer.tool_calls)) == ("Well.", "hm", 2)
    assert answer.prompt.text == REQUEST["chat"][0][1]


def test_nothing_is_known_before_the_first_message():
    answer = StreamedAnswer()
    assert (answer.started, answer.finished, answer.tool_calls, answer.all_finished) == (None, None, [], {})


def test_calls_are_known_as_far_as_they_have_come():
    answer = StreamedAnswer()
    for delta in (
        pb.ToolCallDelta(index=0, id="a", name="f"),
        pb.ToolCallDelta(index=0, arguments_json='{"x"'),
        pb.ToolCallDelta(index=0, arguments_json=": 1"),
    ):
        answer._take(pb.StreamGenerateResponse(chunk=pb.Chunk(tool_calls=[delta])))
    assert answer.tool_calls == [pb.ToolCall(id="a", name="f", arguments_json='{"x": 1')]
