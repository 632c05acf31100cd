"""What the HTTP endpoint is made of: several APIs, each with its own endpoints and its own form of errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Scope

from frontend.api.http.endpoint import Endpoint

ErrorResponse = Callable[[Exception, Scope], Response]
"""Makes the response that tells a client of an error."""


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Attributes:
        prefix: begins all its paths. Errors below it have this API's form, on unknown paths too.
        endpoints: what it offers.
        error_response: makes its errors.
    """

    prefix: str
    endpoints: Sequence[Endpoint]
    error_response: ErrorResponse


class ErrorForms:
    """Tells each client of an error in the form of the API it called.

    Args:
        apis: those with a form of their own.
        default: the form of all other paths.
    """

    def __init__(self, apis: Sequence[Api], default: ErrorResponse) -> None:
        self._apis = apis
        self._default = default

    def response(self, error: Exception, scope: Scope) -> Response:
        """The response for an error of the request in `scope`."""
        path = scope["path"]
        for api in self._apis:
            if path == api.prefix or path.startswith(api.prefix + "/"):
                return api.error_response(error, scope)
        return self._default(error, scope)
