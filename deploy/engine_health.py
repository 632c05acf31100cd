"""Health of a container with an engine: exit status 0 if one serves, else 1; one line says what it does.

    engine_health.py HOST:PORT...

The first address at which an engine answers decides: the container's own, then that of the engine for which it stands
by. grpc.health.v1 is the verdict, for an engine listens while it still loads; its own status is what it says meanwhile.
"""

import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub

TIMEOUT_S = 3.0


def main(addresses: Sequence[str]) -> int:
    """Asks one engine after the other; returns the exit status."""
    for address in addresses:
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
                response = EngineServiceStub(channel).GetEngineStatus(pb.GetEngineStatusRequest(), timeout=TIMEOUT_S)
            except grpc.RpcError:
                continue
        status = response.status
        print(f"{address} {pb.EngineState.Name(status.state).removeprefix('ENGINE_STATE_')} {status.detail}".rstrip())
        return 0 if health.status == health_pb2.HealthCheckResponse.SERVING else 1
    print(f"no engine answers at {' or '.join(addresses)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
