"""What an endpoint picker reads of a frontend: one series per metric, over all of its engines."""

import re

from chairlift.engine.v1 import engine_service_pb2 as pb

NAMES = (
    "endpoint_num_requests_waiting", "endpoint_num_requests_running", "endpoint_kv_cache_usage_perc",
    "endpoint_cache_config_info", "lora_requests_info",
)  # fmt: skip


def attach(metrics, *, blocks=100, free=100, running=0, waiting=0, adapters=(), instance_id=None):
    engine = metrics.engine("HOST:PORT")
    info = pb.EngineInfo(
        model="m", num_kv_blocks=blocks, block_size=16, adapters=[pb.Adapter(name=name) for name in adapters]
    )
    load = pb.LoadStats(num_free_blocks=free, num_running=running, num_waiting=waiting)
    instance_id = instance_id or f"instance of engine {engine.engine}"
    engine.attach(pb.Welcome(engine_instance_id=instance_id, info=info, status=pb.EngineStatus(load=load)))
    return engine


def lines_of(metrics, name):
    """The samples as a picker reads them, which takes the first line."""
    return re.findall(rf"^chairlift:{name}(?:{{.*}})? .*$", metrics.render().decode(), re.M)


def test_load_is_that_of_all_engines_in_one_series(metrics):
    attach(metrics, blocks=100, free=90, running=3, waiting=0)
    attach(metrics, blocks=300, free=10, running=5, waiting=7)
    assert lines_of(metrics, "endpoint_num_requests_waiting") == ["chairlift:endpoint_num_requests_waiting 7.0"]
    assert lines_of(metrics, "endpoint_num_requests_running") == ["chairlift:endpoint_num_requests_running 8.0"]
    # 300 of 400 blocks are taken: neither the mean of the engines' shares nor the first engine's
    assert lines_of(metrics, "endpoint_kv_cache_usage_perc") == ["chairlift:endpoint_kv_cache_usage_perc 0.75"]
    assert lines_of(metrics, "endpoint_cache_config_info") == [
        'chairlift:endpoint_cache_config_info{block_size="16",num_gpu_blocks="400"} 1.0'
    ]


def test_engine_with_two_addresses_counts_once(metrics):
    for _ in ("10.0.0.1:50052", "[fd00::1]:50052"):
        attach(metrics, blocks=100, free=90, running=3, waiting=7, instance_id="one")
    assert lines_of(metrics, "endpoint_num_requests_waiting") == ["chairlift:endpoint_num_requests_waiting 7.0"]
    assert lines_of(metrics, "endpoint_num_requests_running") == ["chairlift:endpoint_num_requests_running 3.0"]
    assert 'num_gpu_blocks="100"' in lines_of(metrics, "endpoint_cache_config_info")[0]


def test_cache_of_unknown_size_does_not_count(metrics):
    """Engines of other projects may not report it; their free blocks are then a number without a meaning."""
    unknown = attach(metrics, blocks=0, free=1 << 31, running=2)
    assert lines_of(metrics, "endpoint_kv_cache_usage_perc") == []
    assert lines_of(metrics, "kv_cache_usage_perc") == []  # 0 would say that it is empty
    attach(metrics, blocks=100, free=25, running=3)
    assert lines_of(metrics, "endpoint_kv_cache_usage_perc") == ["chairlift:endpoint_kv_cache_usage_perc 0.75"]
    assert 'num_gpu_blocks="100"' in lines_of(metrics, "endpoint_cache_config_info")[0]
    assert lines_of(metrics, "endpoint_num_requests_running") == ["chairlift:endpoint_num_requests_running 5.0"]
    assert [line.count(f'engine="{unknown.engine}"') for line in lines_of(metrics, "kv_cache_usage_perc")] == [0]


def test_adapters_of_any_engine_are_named_once(metrics, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 12.5)
    attach(metrics, adapters=("b", "a"))
    second = attach(metrics, adapters=("b",))
    (line,) = lines_of(metrics, "lora_requests_info")
    labels = 'max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters=""'
    assert line == f"chairlift:lora_requests_info{{{labels}}} 12.5"
    second.note_status(pb.EngineStatus(adapters=pb.AdapterList(adapters=[pb.Adapter(name="c")])))
    assert 'running_lora_adapters="a,b,c"' in lines_of(metrics, "lora_requests_info")[0]


def test_endpoint_without_an_engine_reports_nothing_and_not_zero(metrics):
    engine = attach(metrics)
    assert all(lines_of(metrics, name) for name in NAMES)
    engine.detach()
    assert not any(lines_of(metrics, name) for name in NAMES)
