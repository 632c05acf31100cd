"""Routes that generate no text: models, health, version, metrics, tokenize and detokenize."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from chairlift.service.health import Health
from chairlift.v1 import generation_service_pb2 as pb
from frontend import __version__
from frontend.api.active_calls import ActiveCalls
from frontend.api.http.endpoint import Endpoint
from frontend.api.http.json_response import ChunkedJsonResponse, rendered_value
from frontend.api.http.request_body import read_body
from frontend.api.http.response_builder import JsonObject
from frontend.api.http.unknown_parameters import UnknownParameters
from frontend.api.openai.chat_bodies import TokenizeBody
from frontend.api.openai.completion_bodies import DetokenizeBody
from frontend.generation.pipeline import GenerationPipeline
from frontend.observability.metrics import CONTENT_TYPE
from frontend.request.checks import check_at_most
from frontend.request.token_prompt import checked_ids
from frontend.slices import in_slices
from frontend.text.served_model import ServedModel


class InfoRoutes:
    """Handles the routes.

    Args:
        generations: gives the model and counts tokens.
        calls: counts active calls.
        health: serving status.
        unknown_parameters: policy for unknown parameters.
        render_metrics: returns the metrics in Prometheus' text format.
        body_timeout_s: seconds that a body may take to arrive.
        since: Unix seconds, `created` of /v1/models.
    """

    def __init__(
        self,
        generations: GenerationPipeline,
        calls: ActiveCalls,
        health: Health,
        unknown_parameters: UnknownParameters,
        render_metrics: Callable[[], Awaitable[bytes]],
        *,
        body_timeout_s: float,
        since: int,
    ) -> None:
        self._generations = generations
        self._calls = calls
        self._health = health
        self._unknown_parameters = unknown_parameters
        self._render_metrics = render_metrics
        self._body_timeout_s = body_timeout_s
        self._created = since

    def endpoints(self) -> list[Endpoint]:
        """Returns the routes."""
        answers = "Tell whether the process answers"
        return [
            Endpoint("GET", "/v1/models", self.models, "List the models"),
            Endpoint("GET", "/v1/models/", self.models, "List the models", is_described=False),
            Endpoint("GET", "/v1/models/{model:path}", self.model, "Describe a model"),
            Endpoint("POST", "/tokenize", self.tokenize, "Turn text or messages into token ids", TokenizeBody),
            Endpoint("POST", "/detokenize", self.detokenize, "Turn token ids into text", DetokenizeBody),
            Endpoint("GET", "/health", self.health, "Tell whether requests are taken", answers=(), is_open=True),
            Endpoint("GET", "/ping", self.ping, answers, answers=(), is_open=True),
            Endpoint("POST", "/ping", self.ping, answers, answers=(), is_open=True),
            Endpoint("GET", "/version", self.version, "Version of the server"),
            Endpoint("GET", "/metrics", self.metrics, "Metrics for Prometheus", answers=("text/plain",)),
        ]

    async def models(self, request: Request) -> Response:  # noqa: ARG002 - Starlette's signature
        """GET /v1/models: the model under each of its names, then its adapters."""
        model = self._generations.model("")
        names = [model.name, *model.aliases, *(adapter.name for adapter in model.adapters)]
        models = [self._model_object(name, self._generations.model(name)) for name in names]
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's; they have one page
        return JSONResponse({"object": "list", "data": models, **page})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME; a name may contain slashes."""
        name = request.path_params["model"]
        return JSONResponse(self._model_object(name, self._generations.model(name)))

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """GET /health: 200 while requests are taken, else 503."""
        return Response(status_code=200 if self._health.serving else 503)

    async def ping(self, request: Request) -> Response:  # noqa: ARG002
        """GET and POST /ping: 200 as long as the process answers, whether or not it takes requests."""
        return Response()

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        """GET /version."""
        return JSONResponse({"version": __version__})

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        """GET /metrics."""
        return Response(await self._render_metrics(), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize, in vLLM's format."""
        body = await read_body(request, TokenizeBody, timeout_s=self._body_timeout_s)
        headers = self._unknown_parameters.headers(body)
        count = pb.CountTokensRequest(model=body.model, return_token_ids=True)
        chat = await in_slices(body.prompt_of(body.messages)) if body.messages is not None else None
        if body.prompt is not None:
            count.text = body.prompt
        with self._calls.call():
            token_ids = await self._generations.count_tokens(count, chat, add_special_tokens=body.add_special_tokens)
        model = self._generations.model(body.model)
        answer: JsonObject = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            answer["token_strs"] = (model.tokenizer.token_bytes(i).decode(errors="replace") for i in token_ids)
        return ChunkedJsonResponse(await rendered_value(answer), headers)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize, in vLLM's format: the text includes special tokens."""
        body = await read_body(request, DetokenizeBody, timeout_s=self._body_timeout_s)
        headers = self._unknown_parameters.headers(body)
        model = self._generations.model(body.model)
        check_at_most("tokens", len(body.tokens), model.max_model_len, "entries")
        with self._calls.call():
            tokens = await in_slices(checked_ids("tokens", body.tokens, model))
            text = await asyncio.to_thread(model.tokenizer.text_of, tokens)
            return ChunkedJsonResponse(await rendered_value({"prompt": text}), headers)

    def _model_object(self, name: str, model: ServedModel) -> JsonObject:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "chairlift",
            "root": model.name,
            "parent": model.parent,
            "max_model_len": model.max_model_len,
            "meta": {"n_vocab": model.vocab_size},  # llama.cpp's name; clients that send token ids need it
            # Anthropic's names
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": model.max_model_len,
        }
