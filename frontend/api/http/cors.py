"""Web pages of other origins: which ones may call this server from a browser (CORS). By default none."""

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from frontend.api.http.unknown_parameters import HEADER as IGNORED_PARAMETERS

_EXPOSED = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", IGNORED_PARAMETERS)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of these origins call an application; "*" stands for all of them.

    It goes around everything else, the keys too: a browser asks first (preflight) without a key, and a page may read
    an error only if the headers say so. Every request header is allowed, because OpenAI's client adds headers of its
    own to `authorization` and `content-type`; cookies are not, since nothing here is protected by them.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=("GET", "POST"), allow_headers=("*",), expose_headers=_EXPOSED
    )
