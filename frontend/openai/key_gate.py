"""API keys over HTTP: every path takes one, unknown ones too, except those that are open."""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.access.api_keys import ApiKeys
from frontend.errors import Unauthenticated
from frontend.openai.error_object import error_response


class KeyGate:
    """Refuses requests without a key before their body is read.

    Args:
        app: what is behind it.
        keys: what opens the server.
        open_paths: where no key is needed.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] not in self._open_paths:
            try:
                self._keys.check([value for name, value in scope["headers"] if name == b"authorization"])
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
