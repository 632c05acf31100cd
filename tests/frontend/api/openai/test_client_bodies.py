"""Bodies as third-party clients send them: every one is answered, and no parameter but those named is ignored.

Recorded from the clients' own requests, versions of November 2026; the values are ours.
"""

from typing import Any

import aiohttp
import pytest

from frontend.api.http.unknown_parameters import HEADER

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }};{% endfor %}{# <tool_call> #}"


def schema(**options: Any) -> dict[str, Any]:
    kind = {"type": "string", "enum": ["cat", "dog"], "title": "Kind"}
    return {"type": "object", "properties": {"kind": kind}, "required": ["kind"], "title": "Pet", **options}


def tool(**options: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "pet", "description": "", "parameters": schema(), **options}}


def call(**options: Any) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "pet", "arguments": '{"kind": "cat"}'}, **options}


ASKED = {"role": "user", "content": "A pet?"}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "found"}
PETS = '%llguidance {}\n\nstart: pet\npet[capture]: PET\n\nPET: "cat"\n     | "dog"\n\n'
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
BODIES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "LiteLLM, second turn": (
        CHAT,
        {
            "messages": [
                ASKED,
                {
                    "content": None,
                    "role": "assistant",
                    "tool_calls": [call()],
                    "function_call": None,
                    "provider_specific_fields": {"refusal": None},
                },
                {**RESULT, "name": "pet"},
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [tool()],
        },
        None,
    ),
    "LiteLLM, prompt caching": (
        CHAT,
        {
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
                },
                {**ASKED, "cache_control": {"type": "ephemeral"}},
            ],
            "reasoning_effort": "low",
        },
        None,
    ),
    "OpenRouter's answers sent back": (
        CHAT,
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": "A cat.",
                    "id": "gen-1",
                    "reasoning": "hm",
                    "reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0}],
                    "native_finish_reason": "stop",
                },
                {"role": "user", "content": "Sure?"},
            ],
            "transforms": [],
            "provider": {"order": ["a"]},
        },
        "provider",
    ),
    "openai, second turn": (
        CHAT,
        {
            "messages": [
                {"role": "developer", "content": "Be brief."},
                ASKED,
                {
                    "content": None,
                    "refusal": None,
                    "role": "assistant",
                    "annotations": None,
                    "audio": None,
                    "function_call": None,
                    "tool_calls": [call()],
                },
                {**RESULT, "content": [{"type": "text", "text": "found"}]},
            ],
            "tools": [tool()],
            "parallel_tool_calls": True,
            "store": False,
            "service_tier": "auto",
        },
        None,
    ),
    "LangChain, tools": (
        CHAT,
        {
            "messages": [ASKED, {"content": None, "role": "assistant", "tool_calls": [call()]}, RESULT],
            "max_completion_tokens": 60,
            "stream": False,
            "tools": [tool()],
        },
        None,
    ),
    "LangChain, structured": (
        CHAT,
        {
            "messages": [ASKED],
            "max_completion_tokens": 60,
            "parallel_tool_calls": False,
            "stream": False,
            "tool_choice": {"type": "function", "function": {"name": "pet"}},
            "tools": [tool()],
        },
        None,
    ),
    "LangChain, several completions": (  # it refuses an n above best_of
        COMPLETIONS,
        {"prompt": ["abc"], "max_tokens": 2, "n": 2, "best_of": 2},
        None,
    ),
    "huggingface_hub, named tool": (
        CHAT,
        {"messages": [ASKED], "tools": [tool()], "tool_choice": {"function": {"name": "pet"}}, "stream": False},
        None,
    ),
    "guidance": (
        CHAT,
        {
            "messages": [{**ASKED, "content": [{"type": "text", "text": "A pet?"}]}],
            "logprobs": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": None,
            "top_logprobs": 5,
            "top_p": None,
            "guided_decoding_backend": "guidance",
            "guided_grammar": PETS,
            "structured_outputs": {"grammar": PETS},
        },
        "guided_decoding_backend",
    ),
    "instructor": (
        CHAT,
        {
            "messages": [ASKED],
            "max_tokens": 60,
            "response_format": {"type": "json_schema", "json_schema": {"name": "Pet", "schema": schema()}},
        },
        None,
    ),
    "pydantic-ai": (
        CHAT,
        {
            "messages": [{"role": "system", "content": "You know pets."}, ASKED],
            "max_completion_tokens": 60,
            "stream": False,
            "tool_choice": "required",
            "tools": [tool(strict=True)],
        },
        None,
    ),
    "AI SDK, object": (
        CHAT,
        {
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "schema": schema(**{"$schema": DRAFT_7, "additionalProperties": False}),
                    "strict": True,
                    "name": "response",
                },
            },
            "messages": [ASKED],
        },
        None,
    ),
    "lm_eval, scores": (
        COMPLETIONS,
        {
            "prompt": [[1, 2, 3], [4, 5]],
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": 1,
            "seed": 1234,
            "echo": True,
        },
        None,
    ),
    "lm_eval, text": (
        COMPLETIONS,
        {"prompt": ["abc"], "max_tokens": 2, "temperature": 0.0, "stop": ["\n\n"], "seed": 1234, "do_sample": False},
        None,
    ),
    "lm_eval, chat": (
        CHAT,
        {"messages": [{**ASKED, "type": "text"}], "max_tokens": 2, "temperature": 0, "stop": ["x"], "seed": 1234},
        None,
    ),
    "guidellm": (
        COMPLETIONS,
        {
            "prompt": "abc",
            "max_tokens": 2,
            "max_completion_tokens": 2,
            "stop": None,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        None,
    ),
    "guidellm, chat": (
        CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}],
            "max_tokens": 2,
            "max_completion_tokens": 2,
            "stop": None,
            "ignore_eos": True,
        },
        None,
    ),
}


@pytest.mark.parametrize("client", BODIES)
async def test_a_clients_body_is_answered(module_pair, client):
    path, body, ignored = BODIES[client]
    pair = await module_pair(TEMPLATE)
    url, body = f"http://127.0.0.1:{pair.app.http_port}{path}", {"model": "fake", **body}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert b"choices" in await response.read()
        assert response.headers.get(HEADER) == ignored
