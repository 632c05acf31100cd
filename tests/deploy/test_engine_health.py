from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import HealthServicer

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.engine.v1.engine_service_pb2_grpc import EngineServiceServicer, add_EngineServiceServicer_to_server
from deploy import engine_health

UNUSED = "127.0.0.1:1"
StartEngine = Callable[..., str]


class OneState(EngineServiceServicer):
    def __init__(self, status: pb.EngineStatus) -> None:
        self._status = status

    def GetEngineStatus(self, request: pb.GetEngineStatusRequest, context: object) -> pb.GetEngineStatusResponse:
        return pb.GetEngineStatusResponse(status=self._status)


@pytest.fixture
def start_engine() -> Iterator[StartEngine]:
    """start_engine(state, detail, is_serving): the address of an engine that says so of itself."""
    servers = []

    def start(
        state: "pb.EngineState",
        detail: str = "",
        is_serving: bool = False,
        credentials: grpc.ServerCredentials | None = None,
    ) -> str:
        server = grpc.server(ThreadPoolExecutor(1))
        health = HealthServicer()
        answer = health_pb2.HealthCheckResponse
        health.set("", answer.SERVING if is_serving else answer.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        add_EngineServiceServicer_to_server(OneState(pb.EngineStatus(state=state, detail=detail)), server)
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def test_serving_engine_is_healthy(start_engine: StartEngine, capsys: pytest.CaptureFixture[str]) -> None:
    address = start_engine(pb.ENGINE_STATE_SERVING, is_serving=True)
    assert engine_health.main([address]) == 0
    assert capsys.readouterr().out == f"{address} SERVING\n"


@pytest.mark.parametrize("state", [pb.ENGINE_STATE_LOADING, pb.ENGINE_STATE_DRAINING, pb.ENGINE_STATE_FAILED])
def test_engine_that_takes_no_requests_is_not_healthy_and_says_what_it_does(
    start_engine: StartEngine,
    capsys: pytest.CaptureFixture[str],
    state: "pb.EngineState",
) -> None:
    address, other = start_engine(state, "weights 43 %"), start_engine(pb.ENGINE_STATE_SERVING, is_serving=True)
    assert engine_health.main([address, other]) == 1
    name = pb.EngineState.Name(state).removeprefix("ENGINE_STATE_")
    assert capsys.readouterr().out == f"{address} {name} weights 43 %\n"


def test_engine_that_stands_by_is_as_healthy_as_the_one_it_stands_by_for(start_engine: StartEngine) -> None:
    assert engine_health.main([UNUSED, start_engine(pb.ENGINE_STATE_SERVING, is_serving=True)]) == 0
    assert engine_health.main([UNUSED, start_engine(pb.ENGINE_STATE_LOADING)]) == 1


def test_engine_with_mutual_tls_is_asked_with_its_own_certificate(
    start_engine: StartEngine, make_authority: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    authority = make_authority("ours")
    own, other = authority.sign("server"), make_authority("theirs").sign("client")
    credentials = grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.cert.read_bytes())], authority.ca.read_bytes(), require_client_auth=True
    )
    address = start_engine(pb.ENGINE_STATE_SERVING, is_serving=True, credentials=credentials)

    def flags(signed: Any, name: str) -> list[str]:
        files = {"--tls-ca": authority.ca, "--tls-cert": signed.cert, "--tls-key": signed.key}
        return [f"{flag}={file}" for flag, file in files.items()] + [f"--tls-server-name={name}"]

    assert engine_health.main([*flags(own, "localhost"), address]) == 0
    assert capsys.readouterr().out == f"{address} SERVING\n"
    assert engine_health.main([*flags(own, "another-name"), address]) == 1
    assert engine_health.main([*flags(other, "localhost"), address]) == 1
    assert engine_health.main([address]) == 1


def test_no_engine_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_health.main([UNUSED]) == 1
    assert capsys.readouterr().out == f"no engine answers at {UNUSED}\n"
