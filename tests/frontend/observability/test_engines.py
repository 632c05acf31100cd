"""Metrics of engines: several at once, lost ones and restarted ones."""

import asyncio

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.observability.request_metrics import MAX_MODELS
from tests.hang import HANG_S
from tests.support.frontend.fake_engine import FakeEngine

GAUGES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "num_waiting_prefill_tokens": "num_waiting_prefill_tokens",
}
COUNTERS = {
    "num_preemptions_total": "num_preemptions_total",
    "recomputed_tokens_total": "num_recomputed_tokens_total",
    "prefix_cache_queries_total": "prefix_cache_queries_total",
    "prefix_cache_hits_total": "prefix_cache_hits_total",
    "engine_generated_tokens_total": "num_generated_tokens_total",
    "jit_compiles_after_ready_total": "jit_compiles_after_ready_total",
    "integrity_checks_total": "integrity_checks_total",
    "spec_decode_num_drafts_total": "num_drafts_total",
    "spec_decode_num_draft_tokens_total": "num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total": "num_accepted_tokens_total",
}


def load_of(first):
    """Returns a load with a different value in every field, from `first` on."""
    numbers = [field for field in pb.LoadStats.DESCRIPTOR.fields if not field.is_repeated]
    return pb.LoadStats(**{field.name: first + number for number, field in enumerate(numbers)})


def welcome(model="m", instance_id="i", load=None, num_kv_blocks=100):
    info = pb.EngineInfo(model=model, num_kv_blocks=num_kv_blocks, block_size=16, engine_version="1.2")
    return pb.Welcome(engine_instance_id=instance_id, info=info, status=pb.EngineStatus(load=load))


def step(number, load):
    return pb.StepResult(step_seq=number, engine_step=number, load=load)


def test_metrics_of_two_engines_have_their_own_labels(metrics, scrape):
    loads = {"0": load_of(1000), "1": load_of(5000)}
    for label, load in loads.items():
        engine = metrics.engine("HOST:PORT")
        assert engine.engine == label
        engine.attach(welcome(model=f"model-{label}", num_kv_blocks=10_000))
        engine.note_status(pb.EngineStatus(load=load))
    for name, field in (GAUGES | COUNTERS).items():
        assert scrape(metrics, f"chairlift:{name}", "engine", "model_name") == {
            (label, f"model-{label}"): getattr(load, field) for label, load in loads.items()
        }, name
    usage = scrape(metrics, "chairlift:kv_cache_usage_perc", "engine")
    assert usage == {label: pytest.approx(1 - load.num_free_blocks / 10_000) for label, load in loads.items()}


def test_predictions_and_decisions_of_the_latency_policy_are_exported(metrics, scrape):
    engine, other, broken = metrics.engine("HOST:PORT"), metrics.engine("HOST:PORT"), metrics.engine("HOST:PORT")
    for each in (engine, other, broken):
        each.attach(welcome())
    latency = pb.LatencyStats(
        error_bounds=[0.01, 0.5],
        decode_errors=[5, 2, 1],
        prompt_errors=[0, 4, 0],
        decode_error_sum=1.5,
        prompt_error_sum=0.75,
        num_stalls_total=9,
        num_infeasible_total=10,
        num_degraded_total=11,
        num_itl_infeasible_total=12,
    )
    engine.note_status(pb.EngineStatus(latency=latency))
    broken.note_status(pb.EngineStatus(latency=pb.LatencyStats(decode_errors=[1, 2])))
    name = "chairlift:step_time_error_ratio"
    assert scrape(metrics, f"{name}_bucket", "engine", "steps", "le") == {
        ("0", "decode", "0.01"): 5,
        ("0", "decode", "0.5"): 7,
        ("0", "decode", "+Inf"): 8,
        ("0", "prompt", "0.01"): 0,
        ("0", "prompt", "0.5"): 4,
        ("0", "prompt", "+Inf"): 4,
    }
    assert scrape(metrics, f"{name}_sum", "engine", "steps") == {("0", "decode"): 1.5, ("0", "prompt"): 0.75}
    totals = ("step_time_stalls", "infeasible_requests", "degraded_requests", "itl_infeasible_steps")
    assert [scrape(metrics, f"chairlift:{name}_total", "engine")["0"] for name in totals] == [9, 10, 11, 12]
    engine.note_status(pb.EngineStatus())  # a heartbeat may leave it out
    assert scrape(metrics, f"{name}_sum", "engine", "steps")
    engine.detach()
    assert scrape(metrics, f"{name}_sum", "engine", "steps") == {}


def test_latest_load_counts_from_a_step_or_a_heartbeat(metrics, scrape):
    engine = metrics.engine("HOST:PORT")
    engine.attach(welcome(load=pb.LoadStats(num_running=1)))
    assert scrape(metrics, "chairlift:num_requests_running", "engine") == {"0": 1}
    engine.note_step(step(1, pb.LoadStats(num_running=2)))
    assert scrape(metrics, "chairlift:num_requests_running", "engine") == {"0": 2}
    engine.note_status(pb.EngineStatus(load=pb.LoadStats(num_running=3)))
    assert scrape(metrics, "chairlift:num_requests_running", "engine") == {"0": 3}
    engine.note_status(pb.EngineStatus())  # without a load
    engine.note_step(pb.StepResult(step_seq=2, engine_step=2))
    assert scrape(metrics, "chairlift:num_requests_running", "engine") == {"0": 3}


def test_adapters_that_come_and_go_leave_a_bounded_number_of_series(metrics, scrape):
    metrics.engine("HOST:PORT").attach(welcome(model="base"))
    for number in range(1000):
        metrics.requests.shed(f"adapter-{number}", "0", 1)
    ends = scrape(metrics, "chairlift:request_success_total", "model_name", "finished_reason")
    names = {name for name, _ in ends}
    assert names >= {"base", "adapter-0", "other"}
    assert len(names) == MAX_MODELS + 1
    assert sum(ends.values()) == scrape(metrics, "chairlift:requests_received_total") == 1000
    assert ends["other", "shed"] == 1000 - (MAX_MODELS - 1)


def test_gauges_of_a_lost_engine_are_removed(metrics, scrape):
    gone, there = metrics.engine("HOST:PORT"), metrics.engine("HOST:PORT")
    for engine in (gone, there):
        engine.attach(welcome(load=load_of(10)))
    gone.detach()
    assert scrape(metrics, "chairlift:engine_up", "engine") == {"0": 0, "1": 1}
    for name in (*GAUGES, *COUNTERS, "kv_cache_usage_perc", "engine_info", "cache_config_info"):
        assert set(scrape(metrics, f"chairlift:{name}", "engine")) == {"1"}, name


def test_restarted_engine_starts_from_zero(metrics, scrape):
    engine = metrics.engine("HOST:PORT")
    engine.attach(welcome(instance_id="first", load=load_of(1000)))
    engine.note_step(step(70, load_of(1000)))
    engine.detach()
    engine.attach(welcome(instance_id="second"))
    assert scrape(metrics, "chairlift:num_preemptions_total", "engine") == {}  # no report yet
    assert set(scrape(metrics, "chairlift:engine_info", "instance_id")) == {"second"}
    engine.note_step(step(1, pb.LoadStats(num_preemptions_total=2, step_us=3000)))
    assert scrape(metrics, "chairlift:num_preemptions_total", "engine") == {"0": 2}
    assert scrape(metrics, "chairlift:engine_step_seconds_count") == 2


def test_step_in_several_messages_is_counted_once(metrics, scrape):
    engine = metrics.engine("HOST:PORT")
    engine.attach(welcome())
    for number, step_us in ((1, 2000), (1, 2000), (2, 4000)):
        engine.note_step(step(number, pb.LoadStats(step_us=step_us, execute_us=step_us // 2, num_batched_tokens=24)))
    for name, total in (("engine_step_seconds", 0.006), ("engine_step_execute_seconds", 0.003)):
        assert scrape(metrics, f"chairlift:{name}_count") == 2
        assert scrape(metrics, f"chairlift:{name}_sum") == pytest.approx(total)
    assert scrape(metrics, "chairlift:iteration_tokens_total_sum") == 48


def test_integrity_failures_are_counted_once_and_outlive_their_engine(metrics, scrape):
    engine = metrics.engine("HOST:PORT")
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine") == {}
    engine.attach(welcome(load=pb.LoadStats()))
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine", "model_name") == {("0", "m"): 0}
    failed = pb.LoadStats(integrity_failures_total=1)
    engine.note_status(pb.EngineStatus(load=failed))
    engine.note_step(step(1, failed))
    engine.detach()
    engine.attach(welcome(load=failed))  # the same instance again
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine", "model_name") == {("0", "m"): 1}
    engine.detach()
    engine.attach(welcome(instance_id="next", load=pb.LoadStats()))
    engine.note_status(pb.EngineStatus(load=failed))
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine") == {"0": 2}
    engine.detach()
    metrics.drop_engine(engine)  # as when its address is no longer in DNS
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine") == {"0": 2}
    another = metrics.engine("HOST:PORT")
    another.attach(welcome(load=pb.LoadStats()))
    another.note_status(pb.EngineStatus(load=failed))
    assert scrape(metrics, "chairlift:integrity_failures_total", "engine") == {"0": 3}


async def test_gauges_follow_the_connected_engine(make_pair, text_request, scrape, tmp_path):
    address = f"unix:{tmp_path}/engine.sock"
    first = FakeEngine(address=address, heartbeat_s=0.01)
    first.load = pb.LoadStats(num_running=3, num_free_blocks=256, num_preemptions_total=9)
    pair = await make_pair(engine=first)

    async def shows(name, values):
        async with asyncio.timeout(HANG_S):
            while scrape(pair.app.metrics, f"chairlift:{name}", "engine") != values:
                await asyncio.sleep(0.005)

    await shows("num_requests_running", {"0": 3})
    await shows("kv_cache_usage_perc", {"0": 0.75})
    first.load = pb.LoadStats(num_running=5)
    await shows("num_requests_running", {"0": 5})  # with a heartbeat
    first.load = pb.LoadStats(num_running=6, num_batched_tokens=1, step_us=1)
    call = pair.stub().StreamGenerate(text_request("abc"))
    assert sum([message.chunk.num_tokens async for message in call]) == 4
    assert scrape(pair.app.metrics, "chairlift:num_requests_running", "engine") == {"0": 6}
    assert scrape(pair.app.metrics, "chairlift:iteration_tokens_total_count") == first.num_steps
    await first.kill()
    await shows("engine_up", {"0": 0})
    await shows("num_requests_running", {})
    pair.engine = second = FakeEngine(address=address)
    second.load = pb.LoadStats(num_running=1, num_preemptions_total=1)
    await second.start()
    await shows("num_preemptions_total", {"0": 1})
    await shows("num_requests_running", {"0": 1})
    assert set(scrape(pair.app.metrics, "chairlift:engine_info", "instance_id")) == {second.instance_id}


async def test_queue_of_the_frontend_is_exported(make_pair, text_request, scrape):
    pair = await make_pair()
    pair.engine.pause()
    calls = [pair.stub().StreamGenerate(text_request("abcd")) for _ in range(3)]
    await pair.engine.wait_for(lambda: pair.engine.num_open == 3)
    assert scrape(pair.app.metrics, "chairlift:frontend_queue_requests") == 3
    assert scrape(pair.app.metrics, "chairlift:frontend_queue_tokens") == 12
    await pair.engine.step()
    for call in calls:
        await call.read()
    assert scrape(pair.app.metrics, "chairlift:frontend_queue_requests") == 0
    for call in calls:
        call.cancel()
