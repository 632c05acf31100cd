"""The List method of grpc.health.v1, in both programs."""

import grpc
import grpc.aio
from grpc_health.v1.health_pb2 import HealthCheckResponse

from chairlift.service import health_list
from engine.testing_engine import fake_engine_parts, run_engine
from frontend.api.grpc.server import SERVICE_NAME
from frontend.app import FrontendApp
from frontend.config import FrontendConfig

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def listed(address: str) -> dict[str, int]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            "/grpc.health.v1.Health/List",
            request_serializer=health_list.HealthListRequest.SerializeToString,
            response_deserializer=health_list.HealthListResponse.FromString,
        )
        response = await call(health_list.HealthListRequest())
    return {name: each.status for name, each in response.statuses.items()}


async def test_the_frontend_lists_itself_and_its_service() -> None:
    app = FrontendApp(FrontendConfig(port=0, http=False, engine=("127.0.0.1:1",)))
    await app.start()
    try:
        assert await listed(f"127.0.0.1:{app.port}") == {"": SERVING, SERVICE_NAME: NOT_SERVING}
    finally:
        await app.stop()


async def test_the_engine_lists_itself_and_its_service() -> None:
    async with run_engine(fake_engine_parts()) as server:
        statuses = await listed(server.address)
    assert statuses.keys() == {"", "chairlift.engine.v1.EngineService"}
    assert set(statuses.values()) == {SERVING}


def test_the_wire_is_that_of_the_public_proto() -> None:
    response = health_list.list_response({"a": SERVING})
    # map<string, HealthCheckResponse> statuses = 1: an entry with key = 1 and value = 2, whose status = 1
    assert response.SerializeToString() == b"\x0a\x07\x0a\x01a\x12\x02\x08\x01"
