"""Fuzzes the HTTP APIs: random bodies, headers, methods and paths.

Each request gets an answer or an error object, never a 500, and valid streams beside it are complete.
"""

import asyncio
import contextlib
import copy
import itertools
import json
from collections import Counter
from typing import NamedTuple

import aiohttp
import pytest
from pydantic import ValidationError

from frontend.api.http.bodies import body_error
from frontend.api.http.errors import BodyError, error_object
from frontend.api.openai.chat_bodies import ChatBody, TokenizeBody
from frontend.api.openai.completion_bodies import CompletionBody, DetokenizeBody
from frontend.api.openai.generation_spec import chat_spec, completion_specs
from frontend.errors import RequestError
from frontend.request.convert import generation_request
from frontend.slices import at_once
from frontend.text.sampling_defaults import API_DEFAULTS
from frontend.text.served_model import ServedModel
from frontend.text.tokenizer import Tokenizer
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files

pytestmark = pytest.mark.timeout(3600)

FAIR = {200, 400, 404, 405, 413, 415}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
COMPLETION = {"model": "fake", "prompt": "abc", "max_tokens": 4, "stream": True, "n": 2, "stop": ["x"], "logprobs": 2}
CHAT = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ],
    "max_completion_tokens": 4,
    "tool_choice": "none",
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "logprobs": True,
    "top_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"a": 1},
}
BASES = [
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "echo": True, "logit_bias": {"3": 1.5}}),
    ("/v1/chat/completions", CHAT),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"messages": CHAT["messages"]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
FIELDS = sorted(
    {"response_format", "function", "role", "content", "name"}
    | {name for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody) for name in body.model_fields}
)
VALUES = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 300, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**30, 1e300, -1e-300),
    *("", "a", "é☃", "\u0000", "\ud800", "x" * 300, "auto", "required", "fake", "{{ 7 * 7 }}", "<|end|>", "\r\n"),
    *([], [[]], [0], [-1], [257], [258], ["a"], [None], [1, "a"], [[1], "a"], {}, {"a": 1}, {"1": 1}, {"-1": 200}),
    *([{}], {"type": "function"}, [{"type": "text", "text": "x"}], [{"role": "user", "content": "x"}], [[[[[[]]]]]]),
    float("nan"),
    float("inf"),
]


def bent(rng, body):
    """Returns a copy with one to three random changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        node = body
        while isinstance(node, (dict, list)) and node and rng.random() < 0.6:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], (dict, list)):
                break
            node = node[key]
        value = copy.deepcopy(rng.choice(VALUES))
        if isinstance(node, list):
            node.insert(rng.randint(0, len(node)), value)
        elif rng.random() < 0.2 and node:
            del node[rng.choice(list(node))]
        else:
            node[rng.choice([*node, rng.choice(FIELDS)])] = value
    return body


def garbled(rng, data):
    """Changes, removes or duplicates a few bytes."""
    start = rng.randrange(len(data))
    return rng.choice([data[:start], data[:start] + rng.randbytes(3) + data[start + 2 :], data + data[start:]])


class Case(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    data: bytes
    read_before_close: int | None


HEADERS = [
    *({"content-type": kind} for kind in ("text/plain", "", "application/vnd.x+json", "multipart/form-data", "é")),
    *({"authorization": value} for value in ("", "Bearer", "Bearer " + "k" * 10_000, "Basic eDp5")),
    *({"x-request-id": value} for value in ("", "mine", "é", "x" * 129)),
    *({"accept": "text/html"}, {"accept-encoding": "br"}, {"content-encoding": "gzip"}, {"expect": "100-continue"}),
    *(
        {"traceparent": "00-0-0-00"},
        {"cookie": "c" * 8000},
        {"x-" + "k" * 500: ""},
        {"range": "bytes=0-1"},
        {"te": "x"},
    ),
]
OTHER_PATHS = [
    *(
        "/",
        "/v1",
        "/v1/completions/",
        "/v1/models",
        "/v1/models/fake",
        "/v1/models/a/b",
        "/metrics",
        "/health",
        "/version",
    ),
    *(
        "//v1/completions",
        "/v1/%2e%2e/metrics",
        "/%00",
        "/" + "p" * 3000,
        "/v1/completions?a=1&a=2",
        "/v1/models/%ff",
        "/docs",
    ),
]
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO"]


def draw(rng):
    path, base = rng.choice(BASES)
    body = bent(rng, base) if rng.random() < 0.8 else base
    data = json.dumps(body).encode()
    if rng.random() < 0.12:
        data = garbled(rng, data)
    return Case(
        method=rng.choice(METHODS) if rng.random() < 0.05 else "POST",
        path=rng.choice(OTHER_PATHS) if rng.random() < 0.05 else path,
        headers={"content-type": "application/json"} | (rng.choice(HEADERS) if rng.random() < 0.1 else {}),
        data=data,
        read_before_close=rng.choice((0, 1, 100, 1000)) if rng.random() < 0.1 else None,
    )


async def run_case(session, url, case):
    """Runs a case; returns the status and the text, or None if it was cancelled."""
    async with session.request(case.method, url + case.path, data=case.data, headers=case.headers) as response:
        if case.read_before_close is None:
            return response.status, await response.text()
        await response.content.read(case.read_before_close)
        response.close()
        return response.status, None


def check_text(case, status, text):
    """Checks that the answer is well-formed."""
    assert '"code":"internal_error"' not in text
    if status != 200 and case.method != "HEAD" and not case.path.startswith("/health"):
        assert json.loads(text)["error"]["message"]
    elif text.startswith("data: "):
        assert text.endswith("data: [DONE]\n\n")


@pytest.mark.slow
async def test_random_requests_cause_no_500_and_do_not_affect_others(pair, run_cases):
    url = f"http://127.0.0.1:{pair.app.http_port}"
    statuses = Counter()
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def one(rng):
            case = draw(rng)
            status, text = await run_case(session, url, case)
            statuses[status] += 1
            assert status in FAIR, (case, text)
            if text is not None:
                check_text(case, status, text)

        num_cases = await run_cases(one, 0.39)
    assert sum(statuses.values()) == num_cases
    if num_cases >= 1000:
        assert num_cases // 8 < statuses[200] < num_cases * 7 // 8
        assert statuses[400] > num_cases // 8
        assert {404, 405, 415} <= statuses.keys()


REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
BODY = json.dumps(COMPLETION).encode()
STREAM_HEAD = b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
WHOLE = REQUEST + b"connection: close\r\n" + STREAM_HEAD + BODY
BYTES = [
    WHOLE,
    REQUEST + STREAM_HEAD + BODY[:5],
    REQUEST + STREAM_HEAD + BODY + REQUEST + STREAM_HEAD + BODY,  # one behind the other
    REQUEST + b"content-length: -1\r\n\r\n" + BODY,
    REQUEST + b"content-length: 99999999999999999999\r\n\r\n" + BODY,
    REQUEST + b"content-length: 3\r\ncontent-length: 4\r\n\r\n" + BODY,
    REQUEST + b"content-length: 3\r\n" + CHUNKED + b"3\r\nabc\r\n0\r\n\r\n",
    REQUEST + CHUNKED + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n",
    REQUEST + CHUNKED + b"zz\r\n" + BODY,
    REQUEST + CHUNKED + b"ffffffffffffffff\r\n" + BODY,
    REQUEST + b"no colon\r\n\r\n",
    REQUEST + b"x: " + b"v" * 100_000 + b"\r\n\r\n",
    REQUEST + b"x: 1\r\n" * 20_000 + b"\r\n",
    REQUEST.replace(b"HTTP/1.1", b"HTTP/9.9") + STREAM_HEAD,
    b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"\x00" * 1000,
]


@pytest.mark.slow
async def test_random_bytes_on_a_connection_cause_no_500_and_do_not_affect_others(pair, run_cases):
    answered = Counter()

    async def one(rng):
        data = rng.choice(BYTES)
        if rng.random() < 0.5:
            noisy = bytearray(data)
            for _ in range(rng.randint(1, 8)):
                noisy[rng.randrange(len(noisy))] = rng.randrange(256)
            data = bytes(noisy)
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.app.http_port)
        reply = b""
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            if data != WHOLE:
                writer.write_eof()  # end of the request
            reply = await reader.read()
        writer.close()
        status = reply[:12].removeprefix(b"HTTP/1.1 ")
        answered[status] += 1
        refusals = (b"400", b"404", b"405", b"413", b"415", b"431", b"501", b"505")
        assert status in (b"", b"200", *refusals), (data[:300], reply[:300])

    num_cases = await run_cases(one, 0.1)
    assert sum(answered.values()) == num_cases
    if num_cases >= 500:
        assert {b"200", b"400"} <= answered.keys()


@pytest.fixture
def model():
    tokenizer = Tokenizer(byte_tokenizer_files())
    yield ServedModel("fake", "none", 4096, 258, (256,), 20, tokenizer, API_DEFAULTS)
    tokenizer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_value_of_every_parameter_is_accepted_or_refused(path, model):
    base = COMPLETION if path == "/v1/completions" else CHAT
    refusals = []
    for name, value in itertools.product(FIELDS, VALUES):
        data = json.dumps({**base, name: value})
        try:
            if base is COMPLETION:
                spec = at_once(completion_specs(CompletionBody.model_validate_json(data), "id"))[0]
                generation_request(spec, model)
            else:
                body = ChatBody.model_validate_json(data)
                generation_request(chat_spec(body, "id"), model, at_once(body.prompt_of(body.messages)))
        except ValidationError as error:
            refusals.append(body_error(error))
        except (BodyError, RequestError) as error:
            refusals.append(error)
    assert {error_object(error).status for error in refusals} == {400, 404}
    num_cases = len(FIELDS) * len(VALUES)
    assert num_cases // 2 < len(refusals) < num_cases
