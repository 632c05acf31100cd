"""CORS: which origins may call this server from a browser (`--allowed-origins`); by default none."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from frontend.api.http.errors import REQUEST_ID_HEADER, RETRY_MS_HEADER, TICKET_HEADER
from frontend.api.http.unknown_parameters import HEADER as IGNORED_PARAMETERS

_EXPOSED = (
    *(REQUEST_ID_HEADER, "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
    *(RETRY_MS_HEADER, TICKET_HEADER, IGNORED_PARAMETERS),
)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wraps an application so that pages of these origins may call it; "*" allows all.

    This is the outermost layer, outside the API keys: a browser's preflight has no key, and a page may read an error
    only if it has the headers. Every request header is allowed because OpenAI's client adds its own to `authorization`
    and `content-type`. Cookies are not: nothing here uses them.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
    )


def is_from_another_origin(headers: Headers) -> bool:
    """Whether a browser sent the request for a page of another origin.

    Browsers send `Sec-Fetch-Site` to https and loopback addresses, and `Origin` with every POST. Other clients send
    neither.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")
