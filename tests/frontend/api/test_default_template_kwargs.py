"""--default-chat-template-kwargs applies to conversations of every API, beneath a request's own variables."""

import aiohttp
import pytest

from chairlift.v1 import generation_service_pb2 as pb

TEMPLATE = "{{ messages[-1].content }}:{{ mood }}:{{ enable_thinking }}"
DEFAULTS = {"mood": "sad", "enable_thinking": False}
HELLO = [{"role": "user", "content": "hi"}]
OF_DEFAULTS, OF_REQUEST = "hi:sad:False", "hi:gay:True"
OWN = {"mood": "gay", "enable_thinking": True}


@pytest.fixture
async def pair(pair_of):
    return await pair_of(TEMPLATE, default_chat_template_kwargs=DEFAULTS)


@pytest.fixture
async def post(pair):
    async with aiohttp.ClientSession(f"http://127.0.0.1:{pair.app.http_port}") as session:

        async def post(path, body):
            async with session.post(path, json=body) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        yield post


def chat_text(answer):
    return answer["choices"][0]["message"]["content"]


def response_text(answer):
    return answer["output"][0]["content"][0]["text"]


def message_text(answer):
    return answer["content"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/chat/completions", {"messages": HELLO}, chat_text),
        ("/v1/responses", {"input": "hi"}, response_text),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 99}, message_text),
    ],
)
async def test_answers(post, path, body, text_of):
    assert text_of(await post(path, body)) == OF_DEFAULTS
    assert text_of(await post(path, body | {"chat_template_kwargs": {"mood": "gay"}})) == "hi:gay:False"
    assert text_of(await post(path, body | {"chat_template_kwargs": OWN})) == OF_REQUEST


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {"messages": HELLO}, "count"),
        ("/v1/responses/input_tokens", {"input": "hi"}, "input_tokens"),
        ("/v1/messages/count_tokens", {"messages": HELLO}, "input_tokens"),
    ],
)
async def test_counts_of_tokens(post, path, body, field):
    assert (await post(path, body))[field] == len(OF_DEFAULTS)
    assert (await post(path, body | {"chat_template_kwargs": OWN}))[field] == len(OF_REQUEST)


async def test_the_effort_of_a_request_takes_precedence(post):
    answer = await post("/v1/chat/completions", {"messages": HELLO, "reasoning_effort": "high"})
    assert chat_text(answer) == "hi:sad:True"


async def test_over_grpc(pair):
    for variables, text in (("", OF_DEFAULTS), ('{"mood": "gay", "enable_thinking": true}', OF_REQUEST)):
        chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="hi")], template_variables_json=variables)
        stub = pair.stub()
        assert (await stub.Generate(pb.GenerateRequest(spec=pb.GenerationSpec(chat=chat)))).text == text
        assert (await stub.CountTokens(pb.CountTokensRequest(chat=chat))).num_tokens == len(text)
