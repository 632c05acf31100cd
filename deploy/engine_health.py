"""Health of a container with an engine: exit status 0 if one serves, else 1; one line says what it does.

    engine_health.py [--tls-ca CA --tls-cert CERT --tls-key KEY --tls-server-name NAME] HOST:PORT...

The first address at which an engine answers decides: the container's own, then that of the engine for which it stands
by. grpc.health.v1 is the verdict, for an engine listens while it still loads; its own status is what it says meanwhile.
With the flags it speaks mutual TLS, which the probes of Kubernetes do not.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub

TIMEOUT_S = 3.0


def main(words: Sequence[str]) -> int:
    """Asks one engine after the other; returns the exit status."""
    arguments = _parse(words)
    for address in arguments.addresses:
        with _channel(address, arguments) as channel:
            try:
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                response = EngineServiceStub(channel).GetEngineStatus(pb.GetEngineStatusRequest(), timeout=TIMEOUT_S)
            except grpc.RpcError:
                continue
        status = response.status
        print(f"{address} {pb.EngineState.Name(status.state).removeprefix('ENGINE_STATE_')} {status.detail}".rstrip())
        return 0 if health.status == health_pb2.HealthCheckResponse.SERVING else 1
    print(f"no engine answers at {' or '.join(arguments.addresses)}")
    return 1


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("addresses", metavar="HOST:PORT", nargs="+")
    parser.add_argument("--tls-ca", type=Path, metavar="PATH", help="CA certificates (PEM) used to verify the engine")
    parser.add_argument("--tls-cert", type=Path, metavar="PATH", help="certificate chain (PEM) to present")
    parser.add_argument("--tls-key", type=Path, metavar="PATH", help="private key of --tls-cert (PEM)")
    parser.add_argument("--tls-server-name", metavar="NAME", help="name that the engine's certificate must have")
    return parser.parse_args(words)


def _channel(address: str, arguments: argparse.Namespace) -> grpc.Channel:
    options: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if arguments.tls_ca is None:
        return grpc.insecure_channel(address, options)
    if arguments.tls_server_name:
        options.append(("grpc.ssl_target_name_override", arguments.tls_server_name))
    files = (arguments.tls_ca, arguments.tls_key, arguments.tls_cert)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*(file.read_bytes() for file in files)), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
