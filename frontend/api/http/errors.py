"""Maps errors to HTTP statuses and OpenAI's error object."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.responses import JSONResponse
from starlette.types import Scope

from chairlift.service.sampling_fields import STOPPING
from frontend.errors import (
    ClientStalled,
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestError,
    RequestTooLong,
    ServerDraining,
    TargetsInfeasible,
    Unauthenticated,
    WorkerUnavailable,
)

REQUEST_ID_HEADER = "x-request-id"
"""Id of a call: the client's in a request, the log's in a response."""

RETRY_MS_HEADER = "x-chairlift-retry-ms"
"""Milliseconds until the slot of a refused request; Retry-After has them in whole seconds, rounded up."""

TICKET_HEADER = "x-chairlift-retry-ticket"
"""Ticket of that slot; the retry sends it in the same header."""


class BodyError(Exception):
    """A request that is malformed as an HTTP request, or whose body is.

    Args:
        status: HTTP status.
        message: for the client.
        param: the parameter at fault; None: no single one.
        code: error code for programs; None: there is none.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}


class _Row(NamedTuple):
    status: int
    kind: str
    code: str | None


_INVALID = "invalid_request_error"
_TABLE: dict[type[RequestError], _Row] = {
    InvalidRequest: _Row(400, _INVALID, None),
    RequestTooLong: _Row(400, _INVALID, "context_length_exceeded"),
    Unauthenticated: _Row(401, _INVALID, "invalid_api_key"),
    ModelNotFound: _Row(404, _INVALID, "model_not_found"),
    QueueFull: _Row(429, "rate_limit_error", "queue_full"),
    TargetsInfeasible: _Row(429, "rate_limit_error", "targets_infeasible"),
    DeadlineExceeded: _Row(504, "server_error", "deadline_exceeded"),
    EngineUnavailable: _Row(503, "server_error", "engine_unavailable"),
    WorkerUnavailable: _Row(503, "server_error", "worker_unavailable"),
    ServerDraining: _Row(503, "server_error", "server_draining"),
    ClientStalled: _Row(408, _INVALID, "client_stalled"),
    EngineFault: _Row(500, "server_error", "engine_fault"),
}
_DEFECT = _Row(500, "server_error", "internal_error")

COMPLETION_PARAMS: Mapping[str, str] = {
    "text": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "tools_json": "tools",
    "top_logprobs": "logprobs",
    "num_answers": "n",
    "ttft": "x-slo-ttft-ms",
    "inter_token": "x-slo-tpot-ms",
    "service_class": "service_tier",
    "retry_ticket": TICKET_HEADER,
    **{row.public_name: row.http_name for row in STOPPING.values() if row.http_name != row.public_name},
}
"""Names of GenerationSpec's fields in completions, where they differ."""

CHAT_PARAMS: Mapping[str, str] = {**COMPLETION_PARAMS, "prompt": "messages", "top_logprobs": "top_logprobs"}
"""The same for chat completions."""

RESPONSES_PARAMS: Mapping[str, str] = {
    **CHAT_PARAMS,
    "prompt": "input",
    "chat": "input",
    "max_tokens": "max_output_tokens",
    "format": "text.format",
}
"""The same for the Responses API."""


class ErrorObject(NamedTuple):
    """An error's HTTP response."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]


def error_object(error: Exception, params: Mapping[str, str] = COMPLETION_PARAMS) -> ErrorObject:
    """Returns the status, body and headers of an error.

    Any exception but a RequestError or a BodyError is a defect: 500, without its text, which is only logged.

    Args:
        params: the API's names of GenerationSpec's fields; fields not listed keep their names.
    """
    if isinstance(error, BodyError):
        row = _Row(error.status, _INVALID, error.code)
        return ErrorObject(error.status, _body(row, error.message, error.param), dict(error.headers))
    if not isinstance(error, RequestError):
        return ErrorObject(_DEFECT.status, _body(_DEFECT, "internal error; the server's log has the cause", None), {})
    row, message, param, headers = _TABLE[type(error)], error.message, None, {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, ModelNotFound):
        param = "model"
    if isinstance(error, InvalidRequest) and error.field:
        field, param = _last(error.field), _param(error.field, params)
        if message.startswith(field + " "):  # the message names the parameter as this API does
            message = param + message.removeprefix(field)
    if isinstance(error, DeadlineExceeded):  # OpenAI's clients retry after every 5xx; the same timeout would fail again
        headers["x-should-retry"] = "false"
    if isinstance(error, ServerDraining):  # or the client would retry, and be refused, on this connection
        headers["connection"] = "close"
    if (retry_s := error.draw_retry_s()) is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(retry_s * 1000)))  # OpenAI's clients prefer it
        if isinstance(error, TargetsInfeasible):
            headers[RETRY_MS_HEADER] = headers["retry-after-ms"]
            headers[TICKET_HEADER] = error.retry_ticket
    return ErrorObject(row.status, _body(row, message, param), headers)


def error_response(
    error: Exception, params: Mapping[str, str] = COMPLETION_PARAMS, *, scope: Scope | None = None
) -> JSONResponse:
    """Returns the response for an error; see `error_object`.

    Args:
        scope: of the request, whose id becomes a header if `name_call` has set one.
    """
    status, body, headers = error_object(error, params)
    if scope is not None and (request_id := scope.get("state", {}).get("request_id")):
        headers[REQUEST_ID_HEADER] = request_id
    return JSONResponse(body, status, headers)


def _body(row: _Row, message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": row.kind, "param": param, "code": row.code}}


def _param(field: str, names: Mapping[str, str]) -> str:
    """Returns the API's name of a field of GenerationSpec: "stop" for "spec.stop.stop_texts"."""
    name = _last(field)
    if field.startswith(("spec.chat", "chat")) and name != "tools_json":
        name = "chat"
    return names.get(name, name)


def _last(field: str) -> str:
    return field.rpartition(".")[2]
