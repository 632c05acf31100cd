"""API keys over HTTP: every path takes one, unknown ones too, except those that are open.

The key comes as `Authorization: Bearer KEY` or, as Anthropic's clients send it, as `x-api-key: KEY`.
"""

from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from frontend.access.api_keys import ApiKeys
from frontend.api.http.endpoint import ErrorForms
from frontend.errors import Unauthenticated


class KeyGate:
    """Refuses requests without a key before their body is read.

    Args:
        app: what is behind it.
        keys: what opens the server.
        open_paths: where no key is needed.
        forms: of the errors.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str], forms: ErrorForms) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["path"] not in self._open_paths:
            try:
                self._keys.check(_values(scope, b"authorization"), _values(scope, b"x-api-key"))
            except Unauthenticated as error:
                await self._forms.response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _values(scope: Scope, header: bytes) -> list[bytes]:
    return [value for name, value in scope["headers"] if name == header]
