"""What /metrics says of engines that report less than Chairlift's own: nothing, where they report nothing."""

import pytest

from tests.support.frontend.foreign_answers import answer_to
from tests.support.frontend.foreign_engine import ForeignEngine

KINDS = ("vllm", "sglang", "trtllm")
TEXT = "The quick brown fox"


@pytest.mark.parametrize("kind", KINDS)
async def test_busy_engine_without_counters_does_not_look_like_one_that_hangs(make_foreign, read, encode, scrape, kind):
    """The alert ChairliftStalled fires for running requests beside a counter of tokens that does not grow."""
    world = await make_foreign(kind)
    (engine,) = world.engines
    engine.pause()
    reading = read(world, TEXT, max_tokens=20)
    metrics = world.app.metrics
    await world.until(lambda: scrape(metrics, "chairlift:num_requests_running", "engine") == {"0": 1})
    engine.resume()
    await reading.complete(answer_to(encode(TEXT), 20))
    assert scrape(metrics, "chairlift:num_requests_running", "engine").keys() == {"0"}
    for name in ("engine_generated_tokens", "num_preemptions", "prefix_cache_queries", "integrity_checks"):
        assert scrape(metrics, f"chairlift:{name}_total", "engine") == {}, name


@pytest.mark.parametrize(
    "unknown",
    [
        {"kind": "vllm", "loads": {"max_total_num_tokens": 0, "token_usage": 0.5}},  # as vLLM's servicer answers
        {"kind": "sglang", "unimplemented": {"GetLoads"}},  # which knows its capacity, but not what is used of it
        {"kind": "trtllm"},
    ],
    ids=lambda one: one["kind"],
)
async def test_cache_whose_use_is_not_known_has_no_usage(make_foreign, scrape, unknown):
    known = ForeignEngine(loads={"max_total_num_tokens": 3200, "num_used_tokens": 1600})
    world = await make_foreign(known, ForeignEngine(**unknown))
    metrics = world.app.metrics
    usage = "chairlift:kv_cache_usage_perc"
    await world.until(lambda: len(scrape(metrics, "chairlift:num_requests_running", "engine")) == 2)
    assert scrape(metrics, usage, "engine") == {"0": pytest.approx(0.5)}
    assert scrape(metrics, "chairlift:endpoint_kv_cache_usage_perc") == pytest.approx(0.5)
