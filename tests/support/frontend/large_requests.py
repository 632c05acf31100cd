"""Requests that are as large as they may be, or larger: what one client could send to hold up all others.

`send` sends one and returns the outcome; meant for a process of its own, so that only the server's work is measured.
"""

import http.client
import json
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import grpc

from chairlift.v1 import generation_service_pb2 as pb
from frontend.limits import MAX_REQUEST_BYTES

MAX_MODEL_LEN = 1 << 20
"""The context of the model that they are for: what is at the limit of a count is at none of the model's."""

_GRPC_PREFIX = "/chairlift.v1.GenerationService/"
_TEXT = "once upon a time there was a fox, and "
_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
_HELLO = [{"role": "user", "content": "hello"}]


class LargeRequest(NamedTuple):
    """One of them.

    Attributes:
        path: of an HTTP endpoint, or of a gRPC method.
        make: its bytes.
        code: of the answer that it must get: HTTP's, or gRPC's by name.
    """

    path: str
    make: Callable[[], bytes]
    code: int | str


class Outcome(NamedTuple):
    """What came back."""

    code: int | str
    text: str
    num_bytes: int


def _json(**body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


def _filled(start: bytes, entry: bytes, end: bytes) -> bytes:
    """A body of the largest size, full of one thing."""
    room = MAX_REQUEST_BYTES - len(start) - len(entry) - len(end)
    return start + (entry + b",") * (room // (len(entry) + 1)) + entry + end


def _completion(**body: Any) -> bytes:
    return _json(**{"prompt": "x", "max_tokens": 1, **body})


def _chat(**body: Any) -> bytes:
    return _json(**{"messages": _HELLO, "max_tokens": 1, **body})


def _required_call(**parameters: Any) -> bytes:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return _chat(tools=[tool], tool_choice="required")


def _generate(**spec: Any) -> bytes:
    stop = {"stop": pb.StopOptions(max_tokens=1)}
    return pb.GenerateRequest(spec=pb.GenerationSpec(**{**stop, **spec})).SerializeToString()


def _nested_spec(field: int, entry: bytes) -> bytes:
    """A request full of one field of `spec.chat` (4) or another message of the spec, whatever that is."""
    inner = entry * ((MAX_REQUEST_BYTES - 32) // len(entry))
    chat = bytes([field << 3 | 2]) + _varint(len(inner)) + inner
    return b"\x0a" + _varint(len(chat)) + chat


def _varint(value: int) -> bytes:
    digits = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_GENERATE, _COUNT = _GRPC_PREFIX + "Generate", _GRPC_PREFIX + "CountTokens"
_LINE = _TEXT * 70
_LONG = [{"role": "user", "content": _LINE}]
_LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 2500}
_IDS = [i % 250 for i in range(1 << 19)]

LARGE_REQUESTS = {
    # Over HTTP: full of one thing.
    "200,000 messages": LargeRequest(
        _CHATS, lambda: _filled(b'{"messages":[', b'{"role":"user","content":"hi"}', b"]}"), 400
    ),
    "messages at the limit": LargeRequest(_CHATS, lambda: _chat(messages=_HELLO * 4096), 200),
    "messages with calls": LargeRequest(
        _CHATS, lambda: _chat(messages=[{"role": "assistant", "content": "", "tool_calls": [_CALL] * 4}] * 900), 200
    ),
    "content parts": LargeRequest(
        _CHATS,
        lambda: _chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 1024}] * 8),
        200,
    ),
    "a chat of megabytes": LargeRequest(
        _CHATS, lambda: _chat(messages=[{"role": "user", "content": _TEXT * 25000}]), 200
    ),
    "tools of megabytes": LargeRequest(
        _CHATS, lambda: _chat(tools=[{**_TOOL, "description": "d" * 60_000}] * 128, tool_choice="none"), 400
    ),
    "tools": LargeRequest(_CHATS, lambda: _filled(b'{"messages":[],"tools":[', json.dumps(_TOOL).encode(), b"]}"), 400),
    "arguments that refer to all others": LargeRequest(
        _CHATS,
        lambda: _required_call(properties={"a0": {}, **{f"a{i}": {"$ref": "#/properties/a0"} for i in range(1, 1500)}}),
        400,
    ),
    "arguments and definitions": LargeRequest(
        _CHATS,
        lambda: _required_call(
            properties={f"a{i}": {"type": "integer"} for i in range(1500)},
            definitions={f"d{i}": {"type": "integer"} for i in range(3000)},
        ),
        400,
    ),
    "500,000 biases": LargeRequest(
        _COMPLETIONS, lambda: _completion(logit_bias={str(i): 1.0 for i in range(500_000)}), 400
    ),
    "unknown parameters": LargeRequest(_COMPLETIONS, lambda: _completion(**{f"x{i}": i for i in range(400_000)}), 400),
    "values of an unknown one": LargeRequest(_COMPLETIONS, lambda: _filled(b'{"prompt":"x","x":[', b"[]", b"]}"), 400),
    "levels": LargeRequest(_COMPLETIONS, lambda: b'{"prompt":"x","x":' + b"[" * 8_000_000, 400),
    "space": LargeRequest(_COMPLETIONS, lambda: b'{"prompt":' + b" " * 8_000_000 + b'"x","max_tokens":1}', 200),
    "a text of escapes": LargeRequest(
        _COMPLETIONS, lambda: b'{"max_tokens":1,"prompt":"' + b"\\u0041" * 1_000_000 + b'"}', 200
    ),
    "a text of emoji": LargeRequest(_COMPLETIONS, lambda: _completion(prompt="\U0001f600" * 2_000_000), 400),
    "a schema of megabytes": LargeRequest(
        _COMPLETIONS, lambda: _completion(guided_json={"type": "object", "description": "d" * 8_000_000}), 400
    ),
    "a broken end": LargeRequest(_COMPLETIONS, lambda: _completion(user="u" * 8_000_000)[:-1] + b"]", 400),
    # Over HTTP: token ids.
    "a million ids": LargeRequest(_COMPLETIONS, lambda: _completion(prompt=_IDS + _IDS[:-2]), 200),
    "two million ids": LargeRequest(_COMPLETIONS, lambda: _completion(prompt=[1] * 2_000_000), 400),
    "2,048 prompts of ids": LargeRequest(_COMPLETIONS, lambda: _completion(prompt=[_IDS[:200]] * 2048), 200),
    "ids echoed": LargeRequest(
        _COMPLETIONS, lambda: _completion(prompt=_IDS[:300_000], echo=True, return_token_ids=True), 200
    ),
    "ids and their logprobs": LargeRequest(
        _COMPLETIONS, lambda: _completion(prompt=_IDS[:20_000], echo=True, logprobs=5), 200
    ),
    "logprobs of an answer": LargeRequest(
        _COMPLETIONS, lambda: _completion(prompt=_LINE, max_tokens=2500, logprobs=20), 200
    ),
    "logprobs of a message": LargeRequest(
        _CHATS, lambda: _chat(messages=_LONG, max_tokens=2500, logprobs=True, top_logprobs=20), 200
    ),
    "logprobs of a response": LargeRequest("/v1/responses", lambda: _json(input=_LINE, **_LOGPROBS), 200),
    "logprobs of a streamed response": LargeRequest(
        "/v1/responses", lambda: _json(input=_LINE, stream=True, **_LOGPROBS), 200
    ),
    "a prompt of 128 answers": LargeRequest(
        _COMPLETIONS, lambda: _completion(prompt=_IDS[:60_000], n=128, echo=True), 200
    ),
    "tokenized": LargeRequest("/tokenize", lambda: _json(prompt=_TEXT * 25_000, return_token_strs=True), 200),
    "detokenized": LargeRequest("/detokenize", lambda: _json(tokens=_IDS + _IDS[:-2]), 200),
    # Over gRPC.
    "gRPC: four million ids": LargeRequest(
        _GENERATE, lambda: _generate(token_ids=pb.TokenIds(ids=[1] * 4_000_000)), "INVALID_ARGUMENT"
    ),
    "gRPC: a million ids": LargeRequest(
        _GENERATE,
        lambda: _generate(
            token_ids=pb.TokenIds(ids=_IDS + _IDS[:-2]), output=pb.OutputOptions(echo=True, token_ids=True)
        ),
        "OK",
    ),
    "gRPC: messages": LargeRequest(_GENERATE, lambda: _nested_spec(4, b"\x0a\x00"), "INVALID_ARGUMENT"),
    "gRPC: biases": LargeRequest(_GENERATE, lambda: _nested_spec(5, b"\x4a\x02\x08\x01"), "INVALID_ARGUMENT"),
    "gRPC: JSON in tools": LargeRequest(
        _GENERATE,
        lambda: _generate(
            chat=pb.ChatPrompt(
                messages=[pb.ChatMessage(role="user")], tools_json=['{"x":[' + "[]," * 2_000_000 + "[]]}"]
            )
        ),
        "INVALID_ARGUMENT",
    ),
    "gRPC: a text of emoji": LargeRequest(
        _GENERATE, lambda: _generate(text="\U0001f600" * 2_000_000), "INVALID_ARGUMENT"
    ),
    "gRPC: tokens of a text": LargeRequest(
        _COUNT, lambda: pb.CountTokensRequest(text=_TEXT * 25_000, return_token_ids=True).SerializeToString(), "OK"
    ),
}


@cache
def _bytes(name: str) -> bytes:
    return LARGE_REQUESTS[name].make()


def send(name: str, grpc_port: int, http_port: int) -> Outcome:
    """Sends one to a server on this machine."""
    path, data = LARGE_REQUESTS[name].path, _bytes(name)
    if path.startswith(_GRPC_PREFIX):
        return _send_grpc(path, data, grpc_port)
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=300)
    try:
        connection.request("POST", path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    return Outcome(response.status, answer[:300].decode(errors="replace"), len(answer))


def _send_grpc(path: str, data: bytes, port: int) -> Outcome:
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        call: Any = channel.unary_unary(path)
        answer = call.future(data, timeout=300)
        if answer.exception() is None:
            return Outcome("OK", "", len(answer.result()))
        return Outcome(answer.code().name, answer.details()[:300], 0)
