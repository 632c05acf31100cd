"""Errors in Anthropic's format; statuses are those of `api/http/errors.py`."""

import uuid
from collections.abc import Mapping

from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from frontend.api.http.errors import CHAT_PARAMS, error_object
from frontend.api.http.response_builder import JsonObject
from frontend.errors import RequestTooLong

REQUEST_ID_HEADER = "request-id"

_PARAMS: Mapping[str, str] = {
    **CHAT_PARAMS,
    "stop_texts": "stop_sequences",
    "format": "output_config.format",
}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(error: Exception, request_id: str) -> JsonObject:
    """Returns the error object."""
    status, body, _ = error_object(error, _PARAMS)
    message = body["error"]["message"]
    if isinstance(error, RequestTooLong):
        message = f"prompt is too long: {message}"  # clients match these words to shorten a conversation
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    content: JsonObject = {"type": kind, "message": message}
    if code := body["error"]["code"]:
        content["details"] = {"error_code": code}
    return {"type": "error", "error": content, "request_id": request_id}


def error_response(error: Exception, scope: Scope) -> Response:
    """Returns the response for an error."""
    request_id = scope.get("state", {}).get("request_id") or f"req_{uuid.uuid4().hex}"
    status, _, headers = error_object(error)
    content = error_content(error, request_id)
    return JSONResponse(content, status, {**headers, REQUEST_ID_HEADER: request_id})
