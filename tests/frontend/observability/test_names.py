"""Names, labels and buckets of metrics are those of docs/metrics.md, and include vLLM's."""

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.frontend.fake_engine import FakeEngine

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"
ROW = re.compile(
    r"^\| `chairlift:(?P<name>\w+)` \| (?P<kind>\w+) \| (?P<labels>[\w, ]*?) ?\| (?P<meaning>[^|]+) \|$", re.M
)

VLLM_LABELS = {"model_name", "engine"}
VLLM_SAMPLES = {
    "vllm:num_requests_running": VLLM_LABELS,
    "vllm:num_requests_waiting": VLLM_LABELS,
    "vllm:kv_cache_usage_perc": VLLM_LABELS,
    "vllm:prefix_cache_queries_total": VLLM_LABELS,
    "vllm:prefix_cache_hits_total": VLLM_LABELS,
    "vllm:num_preemptions_total": VLLM_LABELS,
    "vllm:spec_decode_num_drafts_total": VLLM_LABELS,
    "vllm:spec_decode_num_draft_tokens_total": VLLM_LABELS,
    "vllm:spec_decode_num_accepted_tokens_total": VLLM_LABELS,
    "vllm:prompt_tokens_total": VLLM_LABELS,
    "vllm:prompt_tokens_cached_total": VLLM_LABELS,
    "vllm:generation_tokens_total": VLLM_LABELS,
    "vllm:request_success_total": {*VLLM_LABELS, "finished_reason"},
    "vllm:cache_config_info": {*VLLM_LABELS, "block_size", "num_gpu_blocks"},
}
VLLM_TIMES = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
VLLM_GAPS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
VLLM_TOKENS = tuple(digit * 10**power for power in range(5) for digit in (1, 2, 5))
VLLM_BOUNDS = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
        *(640, 2560),
    ),
    "inter_token_latency_seconds": VLLM_GAPS,
    "request_time_per_output_token_seconds": VLLM_GAPS,
    "e2e_request_latency_seconds": VLLM_TIMES,
    "request_queue_time_seconds": VLLM_TIMES,
    "request_inference_time_seconds": VLLM_TIMES,
    "request_prefill_time_seconds": VLLM_TIMES,
    "request_decode_time_seconds": VLLM_TIMES,
    "request_prompt_tokens": VLLM_TOKENS,
    "request_generation_tokens": VLLM_TOKENS,
    "request_prefill_kv_computed_tokens": VLLM_TOKENS,
    "request_max_num_generation_tokens": VLLM_TOKENS,
    "request_params_max_tokens": VLLM_TOKENS,
    "request_params_n": (1, 2, 5, 10, 20),
    "request_num_preemptions": (),
    "iteration_tokens_total": (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}


async def exported(make_pair, text_request, **config):
    """Returns metric families by name after one request of each kind."""
    engine = FakeEngine()
    engine.load = engine_pb.LoadStats(num_running=1)
    engine.latency = engine_pb.LatencyStats(decode_errors=[1], prompt_errors=[1])
    pair = await make_pair(engine=engine, **config)
    await pair.stub().Generate(pb.GenerateRequest(spec=text_request("abc").spec))
    with pytest.raises(Exception, match="other"):
        await pair.stub().Generate(pb.GenerateRequest(spec=pb.GenerationSpec(text="a", model="other")))
    await pair.idle()
    return list(text_string_to_metric_families(pair.app.metrics.render().decode()))


def labels_of(family):
    return {label for sample in family.samples for label in sample.labels} - {"le"}


async def test_documented_metrics_are_the_exported_ones(make_pair, text_request):
    documented = {
        row["name"]: (row["kind"], set(filter(None, row["labels"].split(", "))))
        for row in ROW.finditer(DOCS.read_text())
    }
    families = await exported(make_pair, text_request)
    assert {
        family.name.removeprefix("chairlift:") + "_total" * (family.type == "counter"): (family.type, labels_of(family))
        for family in families
        if not family.name.startswith("process_")
    } == documented
    assert all(family.documentation for family in families)
    text = DOCS.read_text()
    assert {sample.labels["finished_reason"] for f in families for sample in f.samples if "success" in f.name} == set(
        re.findall(r"^\| (\w+) \| [^|`]+ \|$", text.partition("| finished_reason |")[2].partition("##")[0], re.M)
    )


async def test_vllms_prefix_exports_the_metrics_of_vllm_dashboards(make_pair, text_request):
    families = await exported(make_pair, text_request, metrics_prefix="vllm")
    samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for name, labels in VLLM_SAMPLES.items():
        assert samples[name] == labels, name
    for name, bounds in VLLM_BOUNDS.items():
        assert samples[f"vllm:{name}_count"] == samples[f"vllm:{name}_sum"] == VLLM_LABELS, name
        (family,) = (family for family in families if family.name == f"vllm:{name}")
        ours = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
        assert ours >= set(map(float, bounds)), name
    assert not any(name.startswith("chairlift") for name in samples)
    model = {sample.labels["model_name"] for f in families for sample in f.samples if "model_name" in sample.labels}
    engine = {sample.labels["engine"] for f in families for sample in f.samples if "engine" in sample.labels}
    assert (model, engine) == ({"fake"}, {"0"})


async def test_buckets_resolve_short_queue_times(make_pair, text_request):
    families = await exported(make_pair, text_request)
    (queue,) = (family for family in families if family.name.endswith("request_queue_time_seconds"))
    bounds = sorted(float(sample.labels["le"]) for sample in queue.samples if sample.name.endswith("_bucket"))
    assert len([bound for bound in bounds if bound < 0.001]) >= 3


async def test_all_outcomes_are_exported_at_zero_before_the_first_request(make_pair, scrape):
    pair = await make_pair()
    ends = scrape(pair.app.metrics, "chairlift:request_success_total", "finished_reason")
    assert ends == dict.fromkeys(("stop", "length", "cancelled", "deadline", "shed", "error"), 0)
    refused = scrape(pair.app.metrics, "chairlift:requests_refused_total", "reason")
    assert refused == dict.fromkeys(("INVALID_REQUEST", "REQUEST_TOO_LONG", "MODEL_NOT_FOUND", "ENGINE_UNAVAILABLE"), 0)
