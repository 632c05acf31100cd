"""`chairlift health`: shows whether a server accepts requests, its model and limits. Exit status 0 if it does, else 1.

With `--engine ADDRESS` it asks an engine instead, which also reports the progress of its load.
"""

import sys
from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift import Client, GenerationError, Tls
from chairlift.client.connection import KEY_VARIABLE, channel_options
from chairlift.client.errors import generation_error
from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub
from chairlift.service.flags import Flag, FlagParser, add_flag
from chairlift.v1 import generation_service_pb2 as pb
from frontend.cli.error_line import error_line
from frontend.cli.server_options import WAIT, add_server_arguments, tls_from_arguments

_SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GenerationService"].full_name


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0 if the server accepts requests, else 1."""
    parser = FlagParser(
        prog="chairlift health",
        description="Shows whether a server accepts requests, its model and limits. Exit status 0 if it does, else 1.",
    )
    add_server_arguments(parser)
    add_flag(parser, Flag("--timeout", "seconds to wait for an answer (default: %(default)g)", WAIT, default=5.0))
    parser.add_argument(
        "--engine", metavar="ADDRESS", help="ask the engine at HOST:PORT or unix:PATH instead, also while it loads"
    )
    arguments = parser.parse_args(argv)
    tls = tls_from_arguments(parser, arguments)
    if arguments.engine is not None:
        return _show_engine(arguments.engine, tls, arguments.timeout)
    try:
        if not _takes_requests(arguments.target, tls, arguments.timeout):
            print("NOT_SERVING")
            return 1
        with Client(arguments.target, tls=tls) as client:
            model = client.get_model(timeout_s=arguments.timeout)
    except ValueError as error:
        parser.error(str(error))
    except GenerationError as error:
        if error.status is grpc.StatusCode.UNAUTHENTICATED:  # only the model needs a key
            print(f"SERVING\nmodel: hidden without an API key, see {KEY_VARIABLE}")
            return 0
        print("NOT_SERVING")
        print(f"chairlift health: {error_line(error, arguments.target)}", file=sys.stderr)
        return 1
    print(f"SERVING\n{_description(model)}")
    return 0


def _channel(address: str, tls: Tls | None, options: Sequence[tuple[str, int]]) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.credentials(), options)


def _takes_requests(target: str, tls: Tls | None, timeout_s: float) -> bool:
    with _channel(target, tls, channel_options(target)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its published types lack the methods
        try:
            response = stub.Check(health_pb2.HealthCheckRequest(service=_SERVICE_NAME), timeout=timeout_s)
        except grpc.RpcError as error:
            raise generation_error(error) from error
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _show_engine(address: str, tls: Tls | None, timeout_s: float) -> int:
    with _channel(address, tls, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            response = EngineServiceStub(channel).GetEngineStatus(engine_pb.GetEngineStatusRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            print("NOT_SERVING")
            print(f"chairlift health: {error_line(generation_error(error), address)}", file=sys.stderr)
            return 1
    status = response.status
    name = engine_pb.EngineState.Name(status.state).removeprefix("ENGINE_STATE_")
    print(f"{name}: {status.detail}" if status.detail else name)
    if response.HasField("info"):
        info, load = response.info, status.load
        print(f"model: {', '.join((info.model, *info.aliases))}\nmax_model_len: {info.max_model_len} tokens")
        print(f"KV cache: {info.num_kv_blocks * info.block_size} tokens, {load.num_free_blocks * info.block_size} free")
        print(f"running: {load.num_running}, waiting: {load.num_waiting}")
    return 0 if status.state == engine_pb.ENGINE_STATE_SERVING else 1


def _description(model: pb.GetModelResponse) -> str:
    lines = {
        "model": ", ".join((model.model, *model.aliases)),
        "max_model_len": f"{model.max_model_len} tokens",
        "vocab_size": f"{model.vocab_size} tokens",
        "chat": "yes" if model.has_chat_template else "no",
        "weights": model.weights_revision,
        "tokenizer": model.tokenizer_sha256,
    }
    return "\n".join(f"{name}: {value}" for name, value in lines.items())
