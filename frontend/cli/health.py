"""`chairlift health`: whether a server takes requests, its model and limits. Exit status 0 if it does, else 1."""

import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift.v1 import generation_service_pb2 as pb
from frontend.cli.complaint import complaint
from frontend.cli.server_options import add_server_arguments, tls_from_arguments
from frontend.client import ChairliftClient, GenerationError, Tls
from frontend.client.connection import KEY_VARIABLE
from frontend.client.errors import generation_error
from frontend.config import OneLineParser

_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 if the server takes requests, else 1."""
    parser = OneLineParser(prog="chairlift health", description="Says whether a server takes requests, and its model.")
    add_server_arguments(parser)
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="S", help="seconds to wait (default: %(default)s)"
    )
    arguments = parser.parse_args(argv)
    tls = tls_from_arguments(parser, arguments)
    try:
        if not _takes_requests(arguments.target, tls, arguments.timeout):
            print("NOT_SERVING")
            return 1
        with ChairliftClient(arguments.target, tls=tls) as client:
            model = client.get_model(timeout_s=arguments.timeout)
    except ValueError as error:
        parser.error(str(error))
    except GenerationError as error:
        if error.status is grpc.StatusCode.UNAUTHENTICATED:  # health is open to all, the model is not
            print(f"SERVING\nmodel: hidden without an API key, see {KEY_VARIABLE}")
            return 0
        print("NOT_SERVING")
        print(f"chairlift health: {complaint(error, arguments.target)}", file=sys.stderr)
        return 1
    print(f"SERVING\n{_description(model)}")
    return 0


def _takes_requests(target: str, tls: Tls | None, timeout_s: float) -> bool:
    with grpc.insecure_channel(target) if tls is None else grpc.secure_channel(target, tls.credentials()) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE_NAME), timeout=timeout_s)
        except grpc.RpcError as error:
            raise generation_error(error) from error
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _description(model: pb.GetModelResponse) -> str:
    lines = {
        "model": model.model,
        "max_model_len": f"{model.max_model_len} tokens",
        "vocab_size": f"{model.vocab_size} tokens",
        "chat": "yes" if model.has_chat_template else "no",
        "weights": model.weights_revision,
        "tokenizer": model.tokenizer_sha256,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
