"""Reads request bodies: bounded in size and time, and parsed without blocking the event loop."""

import asyncio
from typing import TypeVar

from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from chairlift.service.sampling_fields import SAMPLING, STOPPING
from frontend import limits
from frontend.api.http.bodies import Body, body_error
from frontend.api.http.content_coding import gunzipped, is_gzipped
from frontend.api.http.cors import is_from_another_origin
from frontend.api.http.disconnect import ClientGone
from frontend.api.http.errors import BodyError
from frontend.api.http.json_reader import read_json
from frontend.slices import Sliced, in_slices

_LIGHT_BYTES = 512 << 10
_LIGHT_SIGNS = 4096
"""A body of up to _LIGHT_BYTES with at most this many brackets and commas is parsed at once too: 3 ms at most."""

_MOST_ENTRIES = {
    "guided_choice": limits.MAX_CHOICES,
    "input": limits.MAX_MESSAGES,
    "messages": limits.MAX_MESSAGES,
    "prompt": limits.MAX_PROMPTS,
    "stop_sequences": STOPPING["stop_texts"].rule.max_entries,
    "tools": limits.MAX_TOOLS,
    **{row.http_name: row.rule.max_entries for row in (*SAMPLING.values(), *STOPPING.values()) if row.rule.max_entries},
}
"""Maximum entries by parameter. The ids of a long list in `prompt` do not count."""

_OBJECTS = ("tools", "chat_template_kwargs", "response_format", "structured_outputs", "guided_json", "text_format")
_MOST_BYTES = dict.fromkeys(_OBJECTS, limits.MAX_TOOLS_BYTES)
"""Maximum bytes of parameters that are serialized again, for a chat template or a grammar."""

BodyT = TypeVar("BodyT", bound=Body)


async def read_body(request: Request, kind: type[BodyT], *, timeout_s: float) -> BodyT:
    """Reads, parses and checks a body.

    Args:
        timeout_s: seconds that its bytes may take to arrive.

    Raises:
        BodyError: it is not declared as JSON, not JSON, not an object of this kind, too large or too slow.
        ClientGone: the client disconnected before its end.
    """
    _check_content_type(request)
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request)
    except TimeoutError:
        raise BodyError(408, f"the body has not arrived within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None
    return await parsed_body(data, kind)


def _check_content_type(request: Request) -> None:
    """Refuses what a page of another origin can send without a preflight, which answers only for allowed origins."""
    content_type = request.headers.get("content-type")
    if content_type is None:
        if is_from_another_origin(request.headers):
            raise BodyError(
                415,
                "a web page of another origin must set the header content-type: application/json, and its origin must "
                "be one of --allowed-origins",
            )
        return  # curl and others that are no browsers
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        problem = f"content-type is {media_type[:64]!r}, it must be application/json"
        raise BodyError(415, f"{problem} (curl: -H 'content-type: application/json')")


async def parsed_body(data: bytes, kind: type[BodyT]) -> BodyT:
    """Parses and checks a body; large ones in slices.

    Raises:
        BodyError: it is not JSON, not an object of this kind, or has more of something than it may have.
    """
    try:
        if _is_light(data):
            return kind.model_validate_json(data)
        return await in_slices(_checked(data, kind))
    except ValidationError as error:
        raise body_error(error) from None


def _is_light(data: bytes) -> bool:
    if len(data) <= limits.SMALL_REQUEST_BYTES:
        return True
    return len(data) <= _LIGHT_BYTES and sum(map(data.count, (b",", b"[", b"{"))) <= _LIGHT_SIGNS


def _checked(data: bytes, kind: type[BodyT]) -> Sliced[BodyT]:
    value = yield from read_json(data, kind.id_lists, _MOST_ENTRIES, _MOST_BYTES)
    for name, entry_kind in kind.entry_kinds.items():
        entries = value.get(name) if isinstance(value, dict) else None
        if not isinstance(entries, list):
            continue
        for index, entry in enumerate(entries):
            try:
                entries[index] = entry_kind.model_validate(entry)
            except ValidationError:
                break  # again with all the others, where the error gets its place
            yield
    yield
    return kind.model_validate(value)


async def _read(request: Request) -> bytes:
    gzipped = is_gzipped(request)
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limits.MAX_REQUEST_BYTES:
        raise _too_large()
    chunks, num_bytes = [], 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > limits.MAX_REQUEST_BYTES:
            raise _too_large()
        chunks.append(chunk)
    data = b"".join(chunks)
    return await gunzipped(data, limits.MAX_REQUEST_BYTES) if gzipped else data


def _too_large() -> BodyError:
    return BodyError(413, f"the body has more than {limits.MAX_REQUEST_BYTES} bytes", code="body_too_large")
