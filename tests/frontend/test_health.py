from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from frontend.api.grpc.server import SERVICE_NAME
from tests.support.frontend.fake_engine import FakeEngine

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(stub, service):
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_process_is_healthy_and_service_waits_for_an_engine(make_pair):
    pair = await make_pair(engine=FakeEngine(state=engine_pb.ENGINE_STATE_LOADING), wait=False)
    stub = HealthStub(pair.channel())
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    assert await check(stub, SERVICE_NAME) == NOT_SERVING
    await pair.engine.wait_for(lambda: pair.engine.num_sessions == 1)
    pair.engine.set_state(engine_pb.ENGINE_STATE_SERVING)
    assert (await watch.read()).status == SERVING
    pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    assert (await watch.read()).status == NOT_SERVING
    pair.engine.set_state(engine_pb.ENGINE_STATE_SERVING)
    assert (await watch.read()).status == SERVING
    await pair.engine.kill()
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    watch.cancel()


async def test_draining_frontend_is_not_serving(pair):
    stub = HealthStub(pair.channel())
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert (await watch.read()).status == SERVING
    assert await pair.app.drain(1.0) == 0
    assert (await watch.read()).status == NOT_SERVING
    assert await check(stub, "") == SERVING
    watch.cancel()
