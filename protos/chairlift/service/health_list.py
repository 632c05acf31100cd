"""grpc.health.v1 with its List method, which grpcio-health-checking has only in versions that need protobuf 7.

With an older one the method's messages are made here, after the public health.proto.
"""

from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

_PACKAGE = health_pb2.DESCRIPTOR.package
_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"]
_IS_BUILT_IN = "List" in _SERVICE.methods_by_name


def _health_file() -> FileDescriptorProto:
    file = FileDescriptorProto()
    health_pb2.DESCRIPTOR.CopyToProto(file)
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
"""health.proto as it is served here, for reflection."""

_pool = DescriptorPool()
_pool.AddSerializedFile(HEALTH_FILE.SerializeToString())


def _message(name: str) -> Any:
    if _IS_BUILT_IN:
        return getattr(health_pb2, name)
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


HealthListRequest = _message("HealthListRequest")
HealthListResponse = _message("HealthListResponse")


def list_response(statuses: Mapping[str, int]) -> Any:
    """A HealthListResponse: the status of each service, by its name."""
    response = HealthListResponse()
    for name, status in statuses.items():
        response.statuses[name].status = status
    return response


def add_health(servicer: HealthServicer, server: grpc.aio.Server) -> None:
    """Serves Check, Watch and List; the servicer has a method of each name."""
    add_HealthServicer_to_server(servicer, server)
    if not _IS_BUILT_IN:
        handler = grpc.unary_unary_rpc_method_handler(
            servicer.List,  # type: ignore[attr-defined]
            request_deserializer=HealthListRequest.FromString,
            response_serializer=HealthListResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE.full_name, {"List": handler})])
