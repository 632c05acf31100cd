"""Decompresses request bodies: gzip, bounded after decompression; other codings are refused."""

import asyncio
import zlib

from starlette.requests import Request

from frontend.api.http.errors import BodyError

_GZIP = zlib.MAX_WBITS | 16  # zlib's flag for gzip's header and checksum
_GZIP_NAMES = ("gzip", "x-gzip")


def is_gzipped(request: Request) -> bool:
    """Whether a request's body is compressed with gzip.

    Raises:
        BodyError: it is compressed with something else.
    """
    codings = ",".join(request.headers.getlist("content-encoding")).lower().split(",")
    wanted = [coding.strip() for coding in codings if coding.strip() not in ("", "identity")]
    if not wanted:
        return False
    if len(wanted) == 1 and wanted[0] in _GZIP_NAMES:
        return True
    raise BodyError(
        415,
        f"content-encoding is {', '.join(wanted)[:64]!r}, it must be gzip or absent",
        code="unsupported_content_encoding",
        headers={"accept-encoding": "gzip"},
    )


async def gunzipped(data: bytes, max_bytes: int) -> bytes:
    """Decompresses a body in a thread: zlib releases the GIL, so that a large one does not block the event loop.

    Raises:
        BodyError: it is not gzip, not complete, or has more than `max_bytes`, after which decompression stops.
    """
    return await asyncio.to_thread(_gunzipped, data, max_bytes)


def _gunzipped(data: bytes, max_bytes: int) -> bytes:
    member = zlib.decompressobj(_GZIP)
    try:
        content = member.decompress(data, max_bytes + 1)
    except zlib.error as error:
        raise BodyError(400, f"the body is not valid gzip: {error}") from None
    if len(content) > max_bytes:
        raise BodyError(413, f"the body has more than {max_bytes} bytes when decompressed", code="body_too_large")
    if not member.eof:
        raise BodyError(400, "the body is not valid gzip: it ends too early")
    if member.unused_data:  # a second member: clients send one, and a million tiny ones would take minutes
        raise BodyError(400, "the body is not valid gzip: more bytes follow its end")
    return content
