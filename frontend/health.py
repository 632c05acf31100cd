"""grpc.health.v1 that tells the truth: "" while the process lives, the service's name while any engine is attached
and takes requests.

Not grpc_health's own servicer: when one of several watchers of a service leaves, that one forgets the others, who then
wait for ever; and one watcher who does not read holds up every change. Here each watcher waits for the next version of
one table.
"""

# ruff: noqa: N802 - the handlers' names are gRPC's

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer

from chairlift.service.health_list import list_response

_SERVING = pb.HealthCheckResponse.SERVING
_NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
_UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN

Context = grpc.aio.ServicerContext[Any, Any]


class Health(HealthServicer):
    """Health of this process and of one service.

    Args:
        service_name: the service whose health depends on the engine.
    """

    def __init__(self, service_name: str) -> None:
        self._service_name = service_name
        self._statuses = {"": _SERVING, service_name: _NOT_SERVING}
        self._changed: asyncio.Future[None] | None = None

    @property
    def serving(self) -> bool:
        """Whether the service takes requests."""
        return self._statuses[self._service_name] == _SERVING

    def set_serving(self, serving: bool) -> None:
        """Sets the service's health; the process's own stays SERVING."""
        if serving != self.serving:
            self._statuses[self._service_name] = _SERVING if serving else _NOT_SERVING
            if self._changed is not None:
                self._changed.set_result(None)
                self._changed = None

    async def wait_for_change(self) -> None:
        """Waits until some status changes."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)  # shared by all who wait

    async def Check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        """The health of a service; NOT_FOUND if it has none, as the protocol demands."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not known here")
        return pb.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Context) -> Any:  # noqa: ARG002 - gRPC's form
        """The health of all services."""
        return list_response(self._statuses)

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """Sends the health of a service now and whenever it changes, until the client leaves."""
        sent = None
        while True:
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != sent:
                sent = status
                await context.write(pb.HealthCheckResponse(status=status))
            else:
                await self.wait_for_change()
