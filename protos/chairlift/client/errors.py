"""What a failed call says, decoded from the gRPC status and its google.rpc details.

The details travel as a google.rpc.Status in the trailing metadata. Its messages belong to a package that the client
does not need for anything else, so their few fields are read by number: numbers of published messages never change.
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
_LENGTH_DELIMITED = 2  # wire type


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of the request with a value that cannot be served.

    Attributes:
        field: its path, as in `spec.sampling.temperature`.
        description: what is wrong, with the numbers.
    """

    field: str
    description: str


class GenerationError(Exception):
    """A call failed.

    Attributes:
        status: the gRPC status code.
        message: what the server says.
        reason: what happened in one word for programs, as QUEUE_FULL; empty if the server did not say. CLIENT_CLOSED:
            this client has been closed, nothing was sent or the answer was given up.
        field_violations: the fields at fault.
        retry_delay_s: after how long trying again may help, seconds; None if the server did not say.
    """

    def __init__(
        self,
        status: grpc.StatusCode,
        message: str,
        *,
        reason: str = "",
        field_violations: tuple[FieldViolation, ...] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{status.name}: {message}")
        self.status = status
        self.message = message
        self.reason = reason
        self.field_violations = field_violations
        self.retry_delay_s = retry_delay_s


def closed_error() -> GenerationError:
    """The error of a call through a client that has been closed."""
    return GenerationError(grpc.StatusCode.CANCELLED, "this client has been closed", reason="CLIENT_CLOSED")


def generation_error(error: grpc.RpcError) -> GenerationError:
    """From what grpc raised. Details that cannot be read are left out: the status says enough."""
    call = cast("grpc.Call", error)  # every error of a call, sync or asyncio, is also the call
    reason, violations, retry_delay_s = "", [], None
    try:
        for type_name, detail in _details(call.trailing_metadata() or ()):
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
    )


def _details(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[tuple[str, bytes]]:
    """(type, content) of each entry of google.rpc.Status.details, field 3."""
    for key, value in metadata:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            for packed in _fields(value).get(3, []):
                detail = AnyMessage.FromString(packed)
                yield detail.type_url.rpartition("/")[2], detail.value


def _fields(data: bytes) -> dict[int, list[bytes]]:
    """Strings and messages inside any message, by field number; to an empty message all fields are unknown ones."""
    values: dict[int, list[bytes]] = {}
    unknown = UnknownFieldSet(Empty.FromString(data))
    for i in range(len(unknown)):
        if unknown[i].wire_type == _LENGTH_DELIMITED:
            values.setdefault(unknown[i].field_number, []).append(unknown[i].data)
    return values


def _text(fields: dict[int, list[bytes]], number: int) -> str:
    return fields.get(number, [b""])[-1].decode()
