"""The one table from error to gRPC status, and the google.rpc details that go with it."""

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
    Unauthenticated,
)

ERROR_DOMAIN = "chairlift"


class _Row(NamedTuple):
    code: grpc.StatusCode
    reason: str


_TABLE: dict[type[RequestError], _Row] = {
    InvalidRequest: _Row(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST"),
    RequestTooLong: _Row(grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_TOO_LONG"),
    Unauthenticated: _Row(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"),
    ModelNotFound: _Row(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND"),
    QueueFull: _Row(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL"),
    DeadlineExceeded: _Row(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"),
    EngineUnavailable: _Row(grpc.StatusCode.UNAVAILABLE, "ENGINE_UNAVAILABLE"),
    ServerDraining: _Row(grpc.StatusCode.UNAVAILABLE, "SERVER_DRAINING"),
    ClientStalled: _Row(grpc.StatusCode.ABORTED, "CLIENT_STALLED"),
    EngineFault: _Row(grpc.StatusCode.INTERNAL, "ENGINE_FAULT"),
}
_DEFECT = _Row(grpc.StatusCode.INTERNAL, "INTERNAL_ERROR")


class ErrorStatus(NamedTuple):
    """What `context.abort` takes."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def error_status(error: BaseException) -> ErrorStatus:
    """The status of an error, with ErrorInfo, BadRequest where a field is at fault, RetryInfo where waiting helps.

    Anything but a RequestError is a defect of ours: INTERNAL, without its text, which is for the log.
    """
    if not isinstance(error, RequestError):
        return _status(_DEFECT, "internal error; the server's log has the cause", "", None)
    field = error.field if isinstance(error, InvalidRequest) else ""
    retry_ms = None  # gRPC takes 0 for "no time given"
    if error.retry_after_s is not None:
        retry_ms = max(1, math.ceil(error.retry_after_s * 1000))
    return _status(_TABLE[type(error)], error.message, field, retry_ms)


@lru_cache(maxsize=64)
def _status(row: _Row, message: str, field: str, retry_ms: int | None) -> ErrorStatus:
    """Kept, because in a burst thousands are refused in the same words."""
    details = [_packed(error_details_pb2.ErrorInfo(reason=row.reason, domain=ERROR_DOMAIN))]
    metadata: list[tuple[str, str | bytes]] = []
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if retry_ms is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(retry_ms)
        details.append(_packed(retry))
        # What gRPC's own retry policy understands; RetryInfo is for people and for clients that look.
        metadata.append(("grpc-retry-pushback-ms", str(retry_ms)))
    status = rpc_status.to_status(status_pb2.Status(code=row.code.value[0], message=message, details=details))
    return ErrorStatus(row.code, message, (*status.trailing_metadata, *metadata))


def error_reason(error: BaseException | None) -> str:
    """The reason that the ErrorInfo of an error's status gives."""
    return (_TABLE[type(error)] if isinstance(error, RequestError) else _DEFECT).reason


def _packed(detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo) -> Any:
    packed = Any()
    packed.Pack(detail)
    return packed
