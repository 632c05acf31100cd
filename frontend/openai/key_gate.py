"""API keys at the HTTP door: every path wants one, those unknown too, except /health."""

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.access.api_keys import ApiKeys
from frontend.errors import Unauthenticated
from frontend.openai.error_object import error_response

OPEN_PATH = "/health"


class KeyGate:
    """Refuses requests without a key before their body is read.

    Args:
        app: what is behind it.
        keys: what opens the server.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] != OPEN_PATH:
            try:
                self._keys.check([value for name, value in scope["headers"] if name == b"authorization"])
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
