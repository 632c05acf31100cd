"""Maps errors to gRPC statuses with google.rpc details."""

import math
from functools import lru_cache
from typing import NamedTuple

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

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
    error_reason,
)

ERROR_DOMAIN = "chairlift"
TICKET_KEY = "x-chairlift-retry-ticket"
"""Trailing metadata with the ticket of a refusal."""

_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_NO_RETRY = "-1"
"""Tells gRPC's retry policy not to retry by itself: its attempt would not carry the ticket."""

_MAX_MESSAGE_BYTES = 1024
"""Of a message, as UTF-8. Clients accept 8 KiB of metadata by default, and get RESOURCE_EXHAUSTED instead of a status
that is larger. A message is there three times: percent-encoded, in the status and in its details."""

_CODES: dict[type[RequestError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    RequestTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    TargetsInfeasible: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    EngineUnavailable: grpc.StatusCode.UNAVAILABLE,
    WorkerUnavailable: grpc.StatusCode.UNAVAILABLE,
    ServerDraining: grpc.StatusCode.UNAVAILABLE,
    ClientStalled: grpc.StatusCode.ABORTED,
    EngineFault: grpc.StatusCode.INTERNAL,
}


class ErrorStatus(NamedTuple):
    """Arguments of `context.abort`."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def error_status(error: BaseException) -> ErrorStatus:
    """Returns an error's status with ErrorInfo, BadRequest if a field is at fault, RetryInfo if a retry may succeed.

    Any exception but a RequestError is a defect: INTERNAL, without its text, which is only logged.
    """
    if not isinstance(error, RequestError):
        internal = grpc.StatusCode.INTERNAL
        return _status(internal, error_reason(error), "internal error; the server's log has the cause", "", None)
    field = error.field if isinstance(error, InvalidRequest) else ""
    retry_ms = None  # gRPC takes 0 for "no time given"
    if (retry_s := error.draw_retry_s()) is not None:
        retry_ms = max(1, math.ceil(retry_s * 1000))
    if isinstance(error, TargetsInfeasible):
        return _infeasible_status(error, retry_ms)
    return _status(_CODES[type(error)], error.reason, error.message, field, retry_ms)


def _infeasible_status(error: TargetsInfeasible, retry_ms: int | None) -> ErrorStatus:
    """Not cached: each ticket is another one."""
    status = _status.__wrapped__(_CODES[type(error)], error.reason, error.message, "", retry_ms)
    metadata = [(key, value) for key, value in status.trailing_metadata if key != _PUSHBACK_KEY]
    metadata.append((_PUSHBACK_KEY, _NO_RETRY))
    if error.retry_ticket:
        metadata.append((TICKET_KEY, error.retry_ticket))
    return status._replace(trailing_metadata=tuple(metadata))


@lru_cache(maxsize=64)
def _status(code: grpc.StatusCode, reason: str, message: str, field: str, retry_ms: int | None) -> ErrorStatus:
    """Builds a status. Cached, because a burst of refusals repeats the same one thousands of times."""
    message = _shortened(message)
    details = [_packed(error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))]
    metadata: list[tuple[str, str | bytes]] = []
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if retry_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_ms)
        details.append(_packed(retry))
        # gRPC's retry policy reads this key; RetryInfo is for clients that inspect details.
        metadata.append((_PUSHBACK_KEY, str(retry_ms)))
    status = rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=details))
    return ErrorStatus(code, message, (*status.trailing_metadata, *metadata))


def _shortened(message: str) -> str:
    data = message.encode()
    if len(data) <= _MAX_MESSAGE_BYTES:
        return message
    return data[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def _packed(detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
