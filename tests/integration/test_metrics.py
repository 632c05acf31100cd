"""A real engine's metrics, as the frontend exports them, agree with the usage that clients receive."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift import AsyncClient
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from tests.hang import HANG_S
from tests.support.pair import PairAddress


@pytest.fixture
async def app(pair: PairAddress) -> AsyncIterator[FrontendApp]:
    """One more frontend on the pair's engine, in this process."""
    app = FrontendApp(FrontendConfig(port=0, http=False, engine=(pair.engine_target,)))
    await app.start()
    await app.wait_serving(30)
    yield app
    await app.stop()


def values(app: FrontendApp) -> dict[str, float]:
    """Every sample's value, summed over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(app.metrics.render().decode()):
        for sample in family.samples:
            name = sample.name.removeprefix("chairlift:")
            found[name] = found.get(name, 0.0) + sample.value
    return found


async def wait_until_idle(app: FrontendApp) -> None:
    """Until a heartbeat says that the engine runs nothing."""
    async with asyncio.timeout(HANG_S):
        while values(app).get("num_requests_running") != 0:
            await asyncio.sleep(0.05)


async def test_metrics_say_what_the_clients_were_told(app: FrontendApp) -> None:
    prompt = "Once upon a time there was a fox who lived at the edge of a wood. " * 4
    await wait_until_idle(app)  # other tests used the engine before
    before = values(app)
    async with AsyncClient(f"127.0.0.1:{app.port}") as client:
        first = await client.generate(prompt, max_tokens=4, timeout_s=HANG_S)
        others = await asyncio.gather(*(client.generate(prompt, max_tokens=20, timeout_s=HANG_S) for _ in range(8)))
    await wait_until_idle(app)
    usages = [answer.finished.usage for answer in (first, *others)]
    seen = {name: value - before.get(name, 0.0) for name, value in values(app).items()}
    for field, billed, told_by_engine in (
        ("num_output_tokens", "generation_tokens_total", "engine_generated_tokens_total"),
        ("num_prompt_tokens", "prompt_tokens_total", "prefix_cache_queries_total"),
        ("num_cached_tokens", "prompt_tokens_cached_total", "prefix_cache_hits_total"),
    ):
        total = sum(getattr(usage, field) for usage in usages)
        assert total == seen[billed] == seen[told_by_engine] > 0, field
    assert seen["request_success_total"] == seen["request_queue_time_seconds_count"] == 9
    phases = seen["request_queue_time_seconds_sum"] + seen["request_inference_time_seconds_sum"]
    assert 0 < phases <= seen["e2e_request_latency_seconds_sum"]  # the rest is the way between the two
    assert seen["num_requests_waiting"] == seen["num_preemptions_total"] == seen["jit_compiles_after_ready_total"] == 0
    assert 0 < seen["engine_step_execute_seconds_sum"] <= seen["engine_step_seconds_sum"]
    # Where the frontend is behind, several steps come in one message, and the last of them is counted.
    assert seen["engine_step_seconds_count"] > 0
    assert 0 <= values(app)["kv_cache_usage_perc"] < 1
