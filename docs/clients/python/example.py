"""Calls Chairlift from Python without any generated code: the server describes itself by reflection.

    pip install grpcio grpcio-reflection grpcio-status && python example.py [HOST:PORT]

CHAIRLIFT_API_KEY is the server's API key, if it wants one; CHAIRLIFT_TLS_CA the file with its certificate authority, if
it speaks TLS. Where the chairlift package is installed, `from chairlift import Client` is shorter; this example is for
tools without it.
"""

import os
import sys
from pathlib import Path

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from grpc_status import rpc_status

SERVICE = "chairlift.v1.GenerationService"
ENDLESS = {"text": "Once upon a time", "stop": {"max_tokens": 900, "ignore_end_token": True}}
DETAILS = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)


class ApiKey(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Puts the key into the metadata of every call, reflection's included."""

    def __init__(self, key: str) -> None:
        self._metadata = ("authorization", f"Bearer {key}")

    def intercept_unary_unary(self, call, details, request):
        """Also for streams: the call goes on with the key."""
        return call(details._replace(metadata=[*(details.metadata or ()), self._metadata]), request)

    intercept_unary_stream = intercept_stream_stream = intercept_unary_unary


def connect(target: str) -> grpc.Channel:
    """Plain, or TLS with the authority that the environment names; with the key of the environment, if it has one."""
    ca, key = os.environ.get("CHAIRLIFT_TLS_CA"), os.environ.get("CHAIRLIFT_API_KEY")
    if ca is None:
        channel = grpc.insecure_channel(target)
    else:
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(Path(ca).read_bytes()))
    return grpc.intercept_channel(channel, ApiKey(key)) if key else channel


class Methods:
    """The methods of a service, found by reflection: requests and responses are messages made at run time."""

    def __init__(self, channel: grpc.Channel, service: ServiceDescriptor) -> None:
        self._channel = channel
        self._service = service

    def call(self, name: str, request: dict, timeout_s: float | None = None):
        """Starts a call: a response, or for a streaming method an iterable of them."""
        method = self._service.methods_by_name[name]
        make = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        multicallable = make(
            f"/{self._service.full_name}/{name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        return multicallable(ParseDict(request, GetMessageClass(method.input_type)()), timeout=timeout_s)


def stream(methods: Methods) -> None:
    spec = {"text": "Once upon a time", "sampling": {"temperature": 0.8, "seed": 7}, "stop": {"max_tokens": 32}}
    text = ""
    for message in methods.call("StreamGenerate", {"spec": spec}, timeout_s=60):
        match message.WhichOneof("event"):
            case "chunk":
                text += message.chunk.text  # one token or more, whatever was ready
            case "finished":
                finished = MessageToDict(message.finished, preserving_proto_field_name=True)
                num_tokens = finished["usage"]["num_output_tokens"]
                print(f"stream: {finished['reason']} after {num_tokens} tokens: {text!r}")


def cancel(methods: Methods) -> None:
    call = methods.call("StreamGenerate", {"spec": ENDLESS})
    num_chunks = 0
    try:
        for message in call:
            num_chunks += message.HasField("chunk")
            if num_chunks == 3:
                call.cancel()  # the engine frees the request's memory within two steps
    except grpc.RpcError as error:
        print(f"cancel: {error.code().name} after {num_chunks} chunks")


def deadline(methods: Methods) -> None:
    try:
        methods.call("Generate", {"spec": ENDLESS}, timeout_s=0.05)
    except grpc.RpcError as error:
        print(f"deadline: {error.code().name}")


def error_details(methods: Methods) -> None:
    try:
        methods.call("Generate", {"spec": {"text": "Once upon a time", "sampling": {"temperature": -1}}})
    except grpc.RpcError as error:
        print(f"error: {error.code().name}: {error.details()}")
        for packed in rpc_status.from_call(error).details:
            for detail in (kind() for kind in DETAILS):
                if packed.Unpack(detail):
                    fields = MessageToDict(detail, preserving_proto_field_name=True)
                    print(f"  {detail.DESCRIPTOR.name}: {fields}")


def main(target: str) -> None:
    with connect(target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        methods = Methods(channel, pool.FindServiceByName(SERVICE))
        for example in (stream, cancel, deadline, error_details):
            example(methods)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
