"""Any OpenAI-compatible HTTP endpoint: completions and chat, answers as server-sent events.

Lengths are held as vLLM and llama.cpp are told to (`ignore_eos`, `min_tokens`). A connection is opened whenever none is
free, so connecting counts as it would for a client.
"""

import asyncio
import io
import json
from typing import Any, NamedTuple

import aiohttp

from loadgen.errors import TargetError
from loadgen.target.base import (
    PlannedRequest,
    RequestFailedError,
    RequestRefusedError,
    RequestTargets,
    RequestTimedOutError,
    Sink,
    TargetFacts,
    TargetSpec,
)
from loadgen.target.connection_errors import http_complaint, http_reason
from loadgen.target.openai_answer import INFEASIBLE, Answer, error_code, error_text
from loadgen.target.probe import probe_answer, probe_request, refusal
from loadgen.target.sse import EventReader
from loadgen.target.tls import ssl_context

_PATHS = {"completions": "/completions", "chat": "/chat/completions"}
_KEEPALIVE_S = 4.0  # servers on uvicorn hang up after 5: a request must not meet that
_LARGE_BODY_BYTES = 1 << 20  # above it, aiohttp requires a file

_TICKET_HEADER = "x-chairlift-retry-ticket"


class PreparedCall(NamedTuple):
    """A body, and the headers that only this request has."""

    body: bytes
    headers: dict[str, str]


class OpenAiTarget:
    """Connections to one endpoint.

    Args:
        spec: its url is the base path, usually http://HOST:PORT/v1; api is completions or chat.
        probe_timeout_s: for the list of models, seconds.
    """

    def __init__(self, spec: TargetSpec, probe_timeout_s: float) -> None:
        self._spec = spec
        self._probe_timeout_s = probe_timeout_s
        self._url = spec.url + _PATHS[spec.api]
        self._model = spec.model
        self._counts_as_it_goes = False
        self._asks_for_counts = True
        self._has_tokenize = True
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if spec.api_key:
            headers["Authorization"] = f"Bearer {spec.api_key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_S,
                ssl=ssl_context(spec) if spec.url.startswith("https:") else True,
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            headers=headers,
        )

    async def probe(self) -> TargetFacts:
        """See Target: the list of models, then an answer of a few tokens, with usage in every message if it can."""
        facts = await self._facts()
        self._model = facts.model
        request = probe_request(self._spec, facts)
        try:
            await probe_answer(self, self.prepare(request), self._spec)
        except RequestFailedError:
            self._asks_for_counts = False  # `continuous_usage_stats` is vLLM's; others may refuse what they do not know
            try:
                await probe_answer(self, self.prepare(request), self._spec)
            except RequestFailedError as error:
                hint = "; is the path right (usually /v1)?" if "HTTP 404" in str(error) else ""
                raise refusal(self._spec, f"{error}{hint}") from error
        return facts

    async def count_tokens(self, text: str) -> int:
        """Tokens the server makes of this prompt: as /tokenize says (vLLM's form), else the usage of a short answer."""
        prompt = self._prompt(None, text)
        if self._has_tokenize:
            status, body = await self._fetch("POST", self._spec.url.removesuffix("/v1") + "/tokenize", prompt)
            if status == 200 and isinstance(body, dict) and isinstance(body.get("count"), int):
                return int(body["count"])
            self._has_tokenize = False
        status, body = await self._fetch("POST", self._url, {**prompt, "max_tokens": 1})
        if status != 200:
            raise TargetError(f"{self._url} refused a prompt of text: HTTP {status}: {error_text(body)}")
        count = (body.get("usage") or {}).get("prompt_tokens") if isinstance(body, dict) else None
        if not isinstance(count, int):
            raise TargetError(f"{self._url} counts no prompt tokens: prompts of a known length cannot be made of text")
        return count

    def prepare(self, request: PlannedRequest) -> PreparedCall:
        """See Target. Targets are in headers, so that servers that do not know them accept the body."""
        body = self._prompt(request.token_ids, request.text)
        body |= {"max_tokens": request.num_output_tokens, "temperature": self._spec.temperature, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self._asks_for_counts:
            body["stream_options"]["continuous_usage_stats"] = True
        if self._spec.ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": request.num_output_tokens}
        return PreparedCall(json.dumps(body).encode(), {} if request.targets is None else _headers(request.targets))

    async def send(self, prepared: PreparedCall, sink: Sink, retry_ticket: str = "") -> None:
        """See Target."""
        data, headers = prepared
        body = io.BytesIO(data) if len(data) > _LARGE_BODY_BYTES else data
        if retry_ticket:
            headers = headers | {_TICKET_HEADER: retry_ticket}
        sink.sent()
        try:
            async with (
                asyncio.timeout(self._spec.timeout_s),
                self._session.post(self._url, data=body, headers=headers) as response,
            ):
                if response.status != 200:
                    raise await _failure(response)
                await self._read(response, sink)
        except TimeoutError as error:
            raise RequestTimedOutError(f"no end within {self._spec.timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise RequestFailedError(http_reason(error)) from error

    async def close(self) -> None:
        """See Target."""
        await self._session.close()

    async def _read(self, response: aiohttp.ClientResponse, sink: Sink) -> None:
        events, answer = EventReader(), Answer(sink, counts_as_it_goes=self._counts_as_it_goes)
        async for received in response.content.iter_any():
            for data in events.feed(received):
                answer.take(data)
        for data in events.close():
            answer.take(data)
        answer.end()
        self._counts_as_it_goes |= self._asks_for_counts and answer.is_counted_as_it_goes

    def _prompt(self, token_ids: Any, text: str | None) -> dict[str, Any]:
        if self._spec.api == "chat":
            return {"model": self._model, "messages": [{"role": "user", "content": text}]}
        return {"model": self._model, "prompt": text if token_ids is None else token_ids.tolist()}

    async def _facts(self) -> TargetFacts:
        url = self._spec.url
        status, body = await self._fetch("GET", url + "/models")
        if status in (401, 403):
            raise TargetError(f"{url} refuses us (HTTP {status}): put its key into OPENAI_API_KEY")
        if status not in (200, 404, 405):
            raise TargetError(f"{url}/models answers HTTP {status}: {error_text(body)}")
        models = body.get("data") if status == 200 and isinstance(body, dict) else None
        if not isinstance(models, list):  # some servers have no list
            if not self._spec.model:
                raise TargetError(
                    f"{url}/models is no list of models (HTTP {status}): is the path right (usually /v1)? If so, name "
                    "the model with --model"
                )
            return TargetFacts(self._spec.model)
        by_name = {str(model.get("id")): model for model in models if isinstance(model, dict)}
        name = self._spec.model or (next(iter(by_name)) if len(by_name) == 1 else "")
        if name not in by_name:
            wanted = f"has no model {name!r}" if name else "serves several models, or none: choose one with --model"
            raise TargetError(f"{url} {wanted}; it lists {', '.join(sorted(by_name)) or 'nothing'}")
        entry = by_name[name]
        max_model_len = entry.get("max_model_len")  # vLLM's name
        vocab_size = (entry.get("meta") or {}).get("n_vocab")  # llama.cpp's
        return TargetFacts(
            name,
            max_model_len if isinstance(max_model_len, int) else None,
            vocab_size if isinstance(vocab_size, int) else None,
        )

    async def _fetch(self, method: str, url: str, payload: object = None) -> tuple[int, Any]:
        """Status and body of one call before the run. Raises: TargetError: nothing answers."""
        try:
            async with (
                asyncio.timeout(self._probe_timeout_s),
                self._session.request(method, url, json=payload if payload is not None else None) as response,
            ):
                return response.status, await _body(response)
        except TimeoutError:
            raise TargetError(
                f"{url} takes connections but gives no answer within {self._probe_timeout_s:g} s: look at its log"
            ) from None
        except aiohttp.ClientError as error:
            raise TargetError(http_complaint(error, url)) from error
        except ValueError as error:  # a host that is no name, or a key beside a user in the URL
            raise TargetError(f"{url}: {error}") from error


def _headers(targets: RequestTargets) -> dict[str, str]:
    headers = {}
    if targets.service_class:
        headers["x-gateway-inference-objective"] = targets.service_class
    for name, seconds in (("x-slo-ttft-ms", targets.ttft_s), ("x-slo-tpot-ms", targets.inter_token_s)):
        if seconds is not None:
            headers[name] = f"{1e3 * seconds:.10g}"
    return headers


async def _failure(response: aiohttp.ClientResponse) -> RequestFailedError:
    body = await _body(response)
    text = f"HTTP {response.status}: {error_text(body)}"
    if response.status != 429 or error_code(body) != INFEASIBLE:
        return RequestFailedError(text)
    after_ms = response.headers.get("retry-after-ms", "")
    retry_after_s = int(after_ms) / 1e3 if after_ms.isdecimal() else None
    return RequestRefusedError(text, retry_after_s, response.headers.get(_TICKET_HEADER, ""))


async def _body(response: aiohttp.ClientResponse) -> Any:
    """What came, as JSON if it is."""
    text = await response.text(errors="replace")
    try:
        return json.loads(text)
    except ValueError:
        return text
