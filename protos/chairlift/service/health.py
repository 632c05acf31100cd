"""grpc.health.v1 of both servers: Check, List and Watch.

It replaces grpc_health's servicer, which forgets all watchers of a service when one of them leaves, and lets one
watcher that does not read delay every change. List is part of grpcio-health-checking only in versions that need
protobuf 7; with an older one its messages are built here from the public health.proto.
"""

# ruff: noqa: N802 - the handlers' names are gRPC's

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

_PACKAGE = pb.DESCRIPTOR.package
_SERVICE = pb.DESCRIPTOR.services_by_name["Health"]
_IS_BUILT_IN = "List" in _SERVICE.methods_by_name


def _health_file() -> FileDescriptorProto:
    file = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(file)
    if _IS_BUILT_IN:
        return file
    optional, repeated = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED
    text, message = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_MESSAGE
    request = file.message_type.add(name="HealthListRequest")
    response = file.message_type.add(name="HealthListResponse")
    entry = response.nested_type.add(name="StatusesEntry")  # map<string, HealthCheckResponse>
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=optional, type=text)
    value_type = f".{_PACKAGE}.HealthCheckResponse"
    entry.field.add(name="value", number=2, label=optional, type=message, type_name=value_type)
    entry_type = f".{_PACKAGE}.{response.name}.{entry.name}"
    response.field.add(name="statuses", number=1, label=repeated, type=message, type_name=entry_type)
    list_types = {"input_type": f".{_PACKAGE}.{request.name}", "output_type": f".{_PACKAGE}.{response.name}"}
    file.service[0].method.add(name="List", **list_types)
    return file


HEALTH_FILE = _health_file()
"""health.proto with List, for reflection."""

_pool = DescriptorPool()
_pool.AddSerializedFile(HEALTH_FILE.SerializeToString())


def _message(name: str) -> Any:
    if _IS_BUILT_IN:
        return getattr(pb, name)
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


HealthListRequest = _message("HealthListRequest")
HealthListResponse = _message("HealthListResponse")


_Context = grpc.aio.ServicerContext[Any, Any]
_SERVING, _NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class Health(HealthServicer):
    """Health of a server under the names of its services, and "" for the process. Used on the event loop only.

    Args:
        service_names: full names of the services, which have one status.
        process_status_follows: whether "" has the services' status; else it is SERVING while the process runs.
    """

    def __init__(self, *service_names: str, process_status_follows: bool = False) -> None:
        self._service_names = service_names
        self._process_status_follows = process_status_follows
        self._is_closed = False
        self._changed = asyncio.Event()  # replaced at every change
        self.serving = False
        """Whether the service takes requests."""

    def set_serving(self, serving: bool) -> None:
        """Sets the service's status."""
        if serving != self.serving:
            self.serving = serving
            self._wake()

    def close(self) -> None:
        """Sets the status to NOT_SERVING and ends all watches, which would hold up the server's stop."""
        self._is_closed, self.serving = True, False
        self._wake()

    async def wait_for_change(self) -> None:
        """Waits until the status changes."""
        await self._changed.wait()

    async def Check(self, request: pb.HealthCheckRequest, context: _Context) -> pb.HealthCheckResponse:
        """Returns the status of a service; NOT_FOUND for an unknown one, as the protocol demands."""
        status = self._statuses().get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service[:128]!r} is not known here")
        return pb.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: _Context) -> Any:  # noqa: ARG002 - gRPC's form
        """Returns the status of each service."""
        return list_response(self._statuses())

    async def Watch(self, request: pb.HealthCheckRequest, context: _Context) -> None:
        """Sends the status of a service now and at every change, until the client leaves or the server closes."""
        sent = None
        while True:
            changed, is_closed = self._changed, self._is_closed
            status = self._statuses().get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                sent = status
                await context.write(pb.HealthCheckResponse(status=status))
            if is_closed:
                return
            await changed.wait()

    def _statuses(self) -> dict[str, int]:
        status = _SERVING if self.serving else _NOT_SERVING
        names = dict.fromkeys(self._service_names, status)
        return {"": status if self._process_status_follows else _SERVING, **names}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def list_response(statuses: Mapping[str, int]) -> Any:
    """Returns a HealthListResponse with the status of each service."""
    response = HealthListResponse()
    for name, status in statuses.items():
        response.statuses[name].status = status
    return response


def add_health(servicer: Health, server: grpc.aio.Server) -> None:
    """Adds Check, Watch and List to a server."""
    add_HealthServicer_to_server(servicer, server)
    if not _IS_BUILT_IN:
        handler = grpc.unary_unary_rpc_method_handler(
            servicer.List,
            request_deserializer=HealthListRequest.FromString,
            response_serializer=HealthListResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE.full_name, {"List": handler})])
