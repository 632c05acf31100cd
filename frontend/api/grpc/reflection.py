"""Server reflection, v1 beside v1alpha: clients ask for v1 first, grpcio-reflection has only v1alpha.

Both are the same messages under two names; so grpcio-reflection's servicer answers both.
"""

# ruff: noqa: N802 - names of the pool's methods are protobuf's

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from chairlift.service.health import HEALTH_FILE

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICE = f"{_NEW}.ServerReflection"


def add_reflection(services: Sequence[FileDescriptor], server: grpc.aio.Server) -> None:
    """Adds server reflection for the given services, health, reflection itself and the details of errors.

    Args:
        services: proto files of the services.
    """
    pool = _Pool()
    for file in services:
        pool.add_with_imports(file)
    pool.add_with_imports(reflection_pb2.DESCRIPTOR)  # type: ignore[arg-type]
    pool.add(HEALTH_FILE)
    pool.add(_v1_file())
    pool.add_with_imports(error_details_pb2.DESCRIPTOR)  # without it clients show details as bytes
    servicer = reflection.aio.ReflectionServicer(pool.service_names, pool=pool)
    add_ServerReflectionServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(_SERVICE, methods)])


class _Pool:
    """Proto files of the served services only, not of all that the process has loaded. The servicer's pool."""

    def __init__(self) -> None:
        self._pool = DescriptorPool()
        self.service_names: list[str] = []
        self._file_names: set[str] = set()

    def add_with_imports(self, file: FileDescriptor) -> None:
        for imported in file.dependencies:
            self.add_with_imports(imported)
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        self.add(proto)

    def add(self, file: FileDescriptorProto) -> None:
        if file.name not in self._file_names:
            self._file_names.add(file.name)
            self._pool.AddSerializedFile(file.SerializeToString())
            self.service_names += [f"{file.package}.{service.name}" for service in file.service]

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        """Returns the file of a symbol; protobuf's own search knows no methods."""
        service, _, method = symbol.rpartition(".")
        if service in self.service_names and method in self._pool.FindServiceByName(service).methods_by_name:
            symbol = service
        return self._pool.FindFileContainingSymbol(symbol)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def _v1_file() -> FileDescriptorProto:
    """reflection.proto of v1: that of v1alpha in another package."""
    file = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file = text_format.Parse(text_format.MessageToString(file).replace(_OLD, _NEW), FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    return file
