"""Checks API keys of HTTP requests and notes their callers: every path needs one, unknown paths too, except open paths.

The key is sent as `Authorization: Bearer KEY` or, by Anthropic's clients, as `x-api-key: KEY`.
"""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.access.api_keys import Access
from frontend.access.caller import TENANT_HEADER, note_caller
from frontend.api.http.endpoint import ErrorFormats
from frontend.errors import RequestError

_TENANT = TENANT_HEADER.encode()


class ApiKeyMiddleware:
    """Refuses requests without a key before their body is read.

    Args:
        app: the application.
        access: accepted keys.
        open_paths: paths that need no key.
        admin_paths: paths that need a key for administration.
        formats: format the errors.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        open_paths: Collection[str],
        admin_paths: Collection[str],
        formats: ErrorFormats,
    ) -> None:
        self._app = app
        self._access = access
        self._open_paths = frozenset(open_paths)
        self._admin_paths = frozenset(admin_paths)
        self._formats = formats

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] not in self._open_paths:
            is_admin = scope["path"] in self._admin_paths
            keys = self._access.administration if is_admin else self._access.clients
            try:
                caller = keys.check(_values(scope, b"authorization"), _values(scope, b"x-api-key"))
                note_caller(caller, _values(scope, _TENANT) if self._access.trusts_gateway else ())
            except RequestError as error:
                await self._formats.response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]
