"""Errors of failed calls, decoded from the gRPC status and its google.rpc details.

The details are a google.rpc.Status in the trailing metadata. Its messages are in a package that the client would need
for nothing else, so their few fields are read by number; numbers of published messages never change.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_DETAILS_KEY = "grpc-status-details-bin"
_TICKET_KEY = "x-chairlift-retry-ticket"
_LENGTH_DELIMITED = 2  # wire type


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of the request with an invalid value.

    Attributes:
        field: its path, such as `spec.sampling.temperature`.
        description: what is wrong, with the numbers.
    """

    field: str
    description: str


class GenerationError(Exception):
    """A call failed.

    Attributes:
        status: the gRPC status code.
        message: the server's message.
        reason: the cause as one word for programs, such as QUEUE_FULL; empty if the server named none. CLIENT_CLOSED:
            this client was closed before the answer was complete.
        field_violations: the invalid fields.
        retry_delay_s: seconds after which a retry may succeed; None if the server named none.
        retry_ticket: presents the slot that was booked for that retry, as its option `retry_ticket`; empty without one.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
        retry_ticket: bytes = b"",
    ) -> None:
        super().__init__(status, message)  # pickle and copy call __init__ with them
        self.status = status
        self.message = message
        self.reason = reason
        self.field_violations = field_violations
        self.retry_delay_s = retry_delay_s
        self.retry_ticket = retry_ticket

    def __str__(self) -> str:
        return f"{self.status.name}: {self.message}"


def closed_error() -> GenerationError:
    """Returns the error of a call through a closed client."""
    return GenerationError(grpc.StatusCode.CANCELLED, "this client has been closed", reason="CLIENT_CLOSED")


def generation_error(error: grpc.RpcError) -> GenerationError:
    """Converts an error of grpc. Details that cannot be decoded are omitted."""
    call = cast("grpc.Call", error)  # grpc's errors of a call, sync and asyncio, are the call too
    reason, violations, retry_delay_s = "", [], None
    metadata = tuple(call.trailing_metadata() or ())
    try:
        for type_name, detail in _details(metadata):
            fields = _fields(detail)
            if type_name == "google.rpc.ErrorInfo":
                reason = _text(fields, 1)
            elif type_name == "google.rpc.BadRequest":
                violation_fields = [_fields(violation) for violation in fields.get(1, [])]
                violations += [FieldViolation(_text(each, 1), _text(each, 2)) for each in violation_fields]
            elif type_name == "google.rpc.RetryInfo":
                retry_delay_s = Duration.FromString(fields.get(1, [b""])[0]).ToTimedelta().total_seconds()
    except (DecodeError, UnicodeDecodeError):
        pass
    return GenerationError(
        call.code(),
        call.details() or "no reason given",
        reason=reason,
        field_violations=tuple(violations),
        retry_delay_s=retry_delay_s,
        retry_ticket=next((str(value).encode() for key, value in metadata if key == _TICKET_KEY), b""),
    )


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[tuple[str, bytes]]:
    """Yields (type, content) of each entry of google.rpc.Status.details, field 3."""
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            for packed in _fields(value).get(3, []):
                detail = AnyMessage.FromString(packed)
                yield detail.type_url.rpartition("/")[2], detail.value


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """Returns strings and messages inside any message, by field number: an empty message has only unknown fields."""
    values: dict[int, list[bytes]] = {}
    unknown = UnknownFieldSet(Empty.FromString(data))
    for i in range(len(unknown)):
        if unknown[i].wire_type == _LENGTH_DELIMITED:
            values.setdefault(unknown[i].field_number, []).append(unknown[i].data)
    return values


def _text(fields: dict[int, list[bytes]], number: int) -> str:
    return fields.get(number, [b""])[-1].decode()
