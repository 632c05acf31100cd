"""Bodies off the wire: bounded in size and time, then parsed."""

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from frontend.openai.bodies import Body, body_error
from frontend.openai.content_coding import gunzipped, is_gzipped
from frontend.openai.disconnect import ClientGone
from frontend.openai.error_object import BodyError

MAX_BODY_BYTES = 8 << 20
"""Six bytes of JSON for each of a million characters, and room to spare."""

BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, kind: type[BodyT], *, timeout_s: float) -> BodyT:
    """Reads and checks a body.

    Args:
        timeout_s: how long its bytes may take to arrive.

    Raises:
        BodyError: it is not JSON, not an object of this kind, too large or too slow.
        ClientGone: the client left before its end.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith(
        "+json"
    ):  # a web page of others can send no JSON
        raise BodyError(415, f"content-type is {content_type[:64]!r}, it must be application/json")
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request)
    except TimeoutError:
        raise BodyError(408, f"the body has not arrived within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise body_error(error) from None


async def _read(request: Request) -> bytes:
    gzipped = is_gzipped(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            raise _too_large()
        chunks.append(chunk)
    data = b"".join(chunks)
    return await gunzipped(data, MAX_BODY_BYTES) if gzipped else data


def _too_large() -> BodyError:
    return BodyError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="body_too_large")
