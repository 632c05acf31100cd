"""grpc.health.v1 of an engine: SERVING while it takes requests, for "" and for its service's name alike.

Not grpc_health's own servicer: when one of several watchers of a service leaves, that one forgets the others.
"""

# ruff: noqa: N802 - the handlers' names are gRPC's

import asyncio
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from chairlift.engine.v1 import engine_service_pb2
from chairlift.service.health_list import list_response

SERVICE_NAMES = ("", engine_service_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name)

_Context = grpc.aio.ServicerContext[Any, Any]


class EngineHealth(HealthServicer):
    """One state for all names. Everything on the event loop."""

    def __init__(self) -> None:
        self._is_serving = False
        self._is_over = False
        self._changed: asyncio.Event | None = None  # made on the loop; replaced at every change

    def set_serving(self, is_serving: bool) -> None:
        """Requests are taken, or not."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._wake()

    def close(self) -> None:
        """Ends what watches: else the server would wait for it."""
        self._is_over, self._is_serving = True, False
        self._wake()

    async def Check(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """The health now; NOT_FOUND for another name, as the protocol demands."""
        if request.service not in SERVICE_NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not known here")
        return self._response(request.service)

    async def List(self, request: Any, context: _Context) -> Any:  # noqa: ARG002 - gRPC's form
        """The health now, under each of the names."""
        return list_response({name: self._response(name).status for name in SERVICE_NAMES})

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> None:
        """The health now and whenever it changes, until either side leaves."""
        sent = None
        while True:
            if self._changed is None:
                self._changed = asyncio.Event()
            changed, is_over = self._changed, self._is_over
            response = self._response(request.service)
            if response != sent:
                sent = response
                await context.write(response)
            if is_over:
                return
            await changed.wait()

    def _response(self, service: str) -> pb.HealthCheckResponse:
        if service not in SERVICE_NAMES:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=serving if self._is_serving else not_serving)

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None
