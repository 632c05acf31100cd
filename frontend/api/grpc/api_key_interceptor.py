"""Checks API keys of gRPC calls and notes their callers: all methods need a key, except health checks."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.api_keys import Access
from frontend.access.caller import TENANT_HEADER, note_caller
from frontend.api.grpc.capacity_interceptor import refusal
from frontend.errors import RequestError

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
            trusts = self._access.trusts_gateway
            try:
                caller = keys.check([value for name, value in metadata if name == "authorization"])
                tenants = [value for name, value in metadata if name == TENANT_HEADER] if trusts else ()
                note_caller(caller, tenants)  # gRPC runs the handler in this task
            except RequestError as error:
                return refusal(error)
        return await continuation(handler_call_details)
