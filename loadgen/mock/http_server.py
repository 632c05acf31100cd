"""A mock of an OpenAI-compatible server: completions, chat, the list of models, /tokenize and /health."""

import contextlib
import json
from typing import Any

import numpy as np
from aiohttp import web

from loadgen.mock.engine import MockFailureError, MockServer

_MAX_BODY_BYTES = 64 << 20


class MockHttpServer(MockServer):
    """A mock server of OpenAI's HTTP API; its url is http://HOST:PORT/v1."""

    async def start(self) -> None:
        """See MockServer."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._generate),
                web.post("/v1/chat/completions", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, reuse_port=self._shares_port or None)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{port}/v1"

    async def close(self) -> None:
        """See MockServer."""
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:  # noqa: ARG002 - the signature is aiohttp's
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return _error(401, "no such key")
        behaviour = self._engine.behaviour
        entry = {
            "id": behaviour.model,
            "object": "model",
            "max_model_len": behaviour.max_model_len,
            "meta": {"n_vocab": behaviour.vocab_size},
        }
        return web.json_response({"object": "list", "data": [entry]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response(
            {"count": self._prompt(body)[1], "max_model_len": self._engine.behaviour.max_model_len}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self._api_key and request.headers.get("Authorization") != f"Bearer {self._api_key}":
            return _error(401, "no such key")
        body = await request.json()
        if body.get("model") != self._engine.behaviour.model:
            return _error(404, f"The model `{body.get('model')}` does not exist.")
        prompt, num_input_tokens = self._prompt(body)
        usage: dict[str, Any] = {
            "prompt_tokens": num_input_tokens,
            "prompt_tokens_details": {"cached_tokens": self._engine.num_cached(num_input_tokens)},
            "completion_tokens": 0,
        }
        is_chat = request.path.endswith("/chat/completions")
        messages = self._engine.answer(prompt, num_input_tokens, body.get("max_tokens", 16))
        if not body.get("stream"):
            async with contextlib.aclosing(messages):
                text = "".join([" mock" * message.num_tokens async for message in messages])
            usage["completion_tokens"] = text.count("mock")
            return web.json_response({"choices": [{"text": text, "message": {"content": text}}], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        options = body.get("stream_options") or {}
        counts = options.get("continuous_usage_stats", False) and self._engine.behaviour.counts_as_it_goes
        try:
            async with contextlib.aclosing(messages):
                async for message in messages:
                    if not response.prepared:
                        await response.prepare(request)
                        if is_chat and self._engine.behaviour.role_first:
                            await response.write(_event({"role": "assistant", "content": ""}, is_chat=True))
                    usage["completion_tokens"] += message.num_tokens
                    text = " mock" * message.num_tokens
                    shown = usage if counts else None
                    await response.write(_event(text, is_chat=is_chat, usage=shown))
        except MockFailureError as error:
            if not response.prepared:
                return _error(500, str(error))
            await response.write(b"data: " + json.dumps({"error": {"message": str(error)}}).encode() + b"\n\n")
            return response
        await response.write(_event("", is_chat=is_chat, finish_reason="length"))
        if options.get("include_usage"):
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    def _prompt(self, body: dict[str, Any]) -> tuple[bytes, int]:
        """Its bytes and its tokens."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return np.array(prompt, dtype="<u4").tobytes(), len(prompt)
        text = prompt if isinstance(prompt, str) else " ".join(turn["content"] for turn in body.get("messages", ()))
        return text.encode(), self._engine.behaviour.num_text_tokens(text)


def _event(
    content: str | dict[str, str],
    *,
    is_chat: bool,
    usage: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason}
    if is_chat:
        choice["delta"] = content if isinstance(content, dict) else {"content": content}
    else:
        choice["text"] = content
    event = {"choices": [choice]} if usage is None else {"choices": [choice], "usage": usage}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
