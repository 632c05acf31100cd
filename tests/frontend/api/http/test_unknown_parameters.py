"""Unknown parameters, and known parameters that are not served."""

import json
import logging
from typing import Any

import aiohttp
import openai
import pytest

from frontend.api.http.bodies import Body
from frontend.api.http.errors import BodyError
from frontend.api.http.unknown_parameters import HEADER, LOG_INTERVAL_S, MAX_NAMES, UnknownParameters
from frontend.api.openai.chat_bodies import ChatBody

HELLO = [{"role": "user", "content": "hi"}]


def body_of(**members: Any) -> Body:
    return Body.model_validate_json(json.dumps(members))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "stream": False}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_response_header_names_unknown_parameters(shared_pair, path, body):
    url = f"http://127.0.0.1:{shared_pair.app.http_port}{path}"
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json={**body, "temprature": 1}) as response:
            assert response.headers[HEADER] == "temprature"
        async with session.post(url, json=body) as response:
            assert HEADER not in response.headers


async def test_members_of_nested_parameters_are_named_with_their_path(shared_client):
    options = {"include_usage": True, "x": 1}
    response = await shared_client.chat.completions.with_raw_response.create(
        model="fake",
        messages=HELLO,
        stream=True,
        stream_options=options,
        extra_body={"response_format": {"type": "text", "y": 2, "z": None}},
    )
    assert response.headers[HEADER] == "stream_options.x, response_format.y"


@pytest.mark.parametrize("policy", ["ignore", "refuse"])
async def test_flag_ignores_or_refuses_them(make_pair, connect, policy):
    client = connect(await make_pair(http=True, unknown_parameters=policy))
    body: dict[str, Any] = {"model": "fake", "prompt": "a", "extra_body": {"temprature": 1, "top_a": None}}
    if policy == "ignore":
        assert HEADER not in (await client.completions.with_raw_response.create(**body)).headers
        return
    with pytest.raises(openai.BadRequestError, match="temprature") as caught:
        await client.completions.create(**body)
    assert (caught.value.param, caught.value.code) == ("temprature", "unknown_parameter")


OFF = (None, False, "", [], {})


@pytest.mark.parametrize("policy", ["warn", "refuse"])
@pytest.mark.parametrize("name", ["unheard_of", "functions", "audio", "web_search_options", "suffix", "lora"])
def test_values_that_ask_for_nothing_are_taken(name, policy):
    for value in OFF:
        assert UnknownParameters(policy).headers(body_of(**{name: value})) == {}


NEUTRAL = {
    "function_call": "none",
    "modalities": ["text"],
    "length_penalty": 1.0,
    "typical_p": 1.0,
    "mirostat": 0,
    "repeat_last_n": -1,
    "top_n_sigma": -1.0,
    "detokenize": True,
    "use_beam_search": False,
}
WITHOUT_EFFECT = {"user": "me", "store": True, "metadata": {"a": "b"}, "prediction": {"type": "content"}, "n_keep": 4}


@pytest.mark.parametrize("policy", ["ignore", "warn", "refuse"])
def test_values_that_change_nothing_are_taken(policy):
    assert UnknownParameters(policy).headers(body_of(**NEUTRAL, **WITHOUT_EFFECT)) == {}


UNSERVED = {
    "suffix": "b",
    "audio": {"voice": "x"},
    "functions": [{"name": "f"}],
    "modalities": ["audio"],
    "web_search_options": {"a": 1},
    "chat_template": "x",
    "prompt_embeds": "x",
    "logprob_token_ids": [1],
    "typical_p": 0.9,
    "mirostat": 2,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.8,
    "repeat_last_n": 64,
}


@pytest.mark.parametrize("name", UNSERVED)
def test_unserved_parameters_are_refused_under_every_policy(name):
    with pytest.raises(BodyError, match=name) as caught:
        body_of(**{name: UNSERVED[name]})
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, name, "unsupported_parameter")


@pytest.fixture
def warn(caplog):
    """warn(seconds, body) -> headers; the lines in the log are in `caplog`."""
    caplog.set_level(logging.WARNING, logger="frontend.api.http.unknown_parameters")
    now_s = 0.0
    unknown = UnknownParameters("warn", lambda: now_s)

    def at(time_s: float, **members: Any) -> Any:
        nonlocal now_s
        now_s = time_s
        return unknown.headers(body_of(**members))

    return at


def test_log_has_one_line_a_minute_with_all_names_since_the_last_one(warn, caplog):
    warn(0, a=1)
    warn(1, b=1)
    warn(LOG_INTERVAL_S - 1, c=1, a=1)
    assert len(caplog.messages) == 1
    assert "1 HTTP request: a (" in caplog.messages[0]
    warn(LOG_INTERVAL_S, d=1)
    assert len(caplog.messages) == 2
    assert "3 HTTP requests: b, c, a, d (" in caplog.messages[1]


def test_names_are_escaped_and_bounded_in_length_and_number(warn, caplog):
    headers = warn(0, **{"a\r\nx: y,\x1b[31m é\x00": 1, "b" * 10_000: 1})
    line, header = caplog.messages[0], headers[HEADER]
    for text in (line, header):
        assert text.isascii()
        assert text.isprintable()
        assert "b" * 65 not in text
    assert header.count(",") == 1
    headers = warn(LOG_INTERVAL_S, **{f"p{index}": 1 for index in range(1000)})
    assert headers[HEADER].split(", ") == [*(f"p{index}" for index in range(MAX_NAMES)), "..."]
    assert len(caplog.messages[1]) < 400


def test_names_in_a_refusal_are_escaped_and_bounded():
    with pytest.raises(BodyError) as caught:
        UnknownParameters("refuse").headers(body_of(**{"\x1b[31m" + "x" * 10_000: 1}))
    assert caught.value.message.isprintable()
    assert len(caught.value.message) < 200


def test_unknown_members_of_messages_are_not_parameters():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", "x": 1}, "x": 1, "index": "?"}
    message = {"role": "assistant", "content": [{"type": "text", "text": "a", "x": 1}], "tool_calls": [call], "x": 1}
    body = ChatBody.model_validate_json(json.dumps({"messages": [message]}))
    assert list(body.unknown_parameters()) == []
