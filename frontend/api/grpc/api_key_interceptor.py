"""Checks API keys of gRPC calls: every method needs one, unknown methods too, except health checks."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.api_keys import Access
from frontend.api.grpc.capacity_interceptor import refusal
from frontend.errors import Unauthenticated

_ADMIN_METHODS = frozenset(
    f"/{pb.DESCRIPTOR.services_by_name['GenerationService'].full_name}/{name}"
    for name in ("LoadAdapter", "UnloadAdapter")
)
_OPEN_PREFIX = f"/{health_pb2.DESCRIPTOR.services_by_name['Health'].full_name}/"


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key before their request is read. Must follow ErrorInterceptor.

    Args:
        access: accepted keys.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Returns the method's own handler, or one that refuses."""
        if not handler_call_details.method.startswith(_OPEN_PREFIX):
            metadata = handler_call_details.invocation_metadata or ()
            is_admin = handler_call_details.method in _ADMIN_METHODS
            keys = self._access.administration if is_admin else self._access.clients
            try:
                keys.check([value for name, value in metadata if name == "authorization"])
            except Unauthenticated as error:
                return refusal(error)
        return await continuation(handler_call_details)
