"""Health of a container with an engine: exit status 0 if one serves, else 1; one line says what it does.

    engine_health.py HOST:PORT...

The first address at which an engine answers decides: the container's own, then that of the engine for which it stands
by. Asks for the engine's state and not only for a connection: an engine listens while it still loads.
"""

import sys
from collections.abc import Sequence

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceStub

TIMEOUT_S = 3.0


def main(addresses: Sequence[str]) -> int:
    """Asks one engine after the other; returns the exit status."""
    for address in addresses:
        with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            try:
                response = EngineServiceStub(channel).GetEngineStatus(pb.GetEngineStatusRequest(), timeout=TIMEOUT_S)
            except grpc.RpcError:
                continue
        status = response.status
        print(f"{address} {pb.EngineState.Name(status.state).removeprefix('ENGINE_STATE_')} {status.detail}".rstrip())
        return 0 if status.state == pb.ENGINE_STATE_SERVING else 1
    print(f"no engine answers at {' or '.join(addresses)}")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
