"""API keys at the gRPC door: every method wants one, those unknown too, except health."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from frontend.access.api_keys import ApiKeys
from frontend.api.grpc.capacity_interceptor import refusal
from frontend.errors import Unauthenticated

_OPEN_PREFIX = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key before anything of them is read. Belongs behind ErrorInterceptor.

    Args:
        keys: what opens the server.
    """

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's own handler, or one that refuses."""
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            metadata = handler_call_details.invocation_metadata or ()
            try:
                self._keys.check([value for name, value in metadata if name == "authorization"])
            except Unauthenticated as error:
                return refusal(error)
        return await continuation(handler_call_details)
