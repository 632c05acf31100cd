"""Exports the engines' latest reports as metrics on each scrape.

An engine's totals are exported unchanged: a new engine starts at zero, which Prometheus handles as a restart. Metrics
of a disconnected engine are absent: old values would be wrong, and zeros would tell an autoscaler that nothing waits.
Counters that an engine does not report are absent too: an engine that generates nothing looks like one that hangs.
Only failed KV cache consistency checks are counted here, and remain.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.observability.engine_metrics import EngineMetrics
from frontend.observability.request_metrics import LABELS


class _Row(NamedTuple):
    name: str
    text: str
    value: Callable[[pb.LoadStats], float]


_GAUGES = (
    _Row("num_requests_running", "Requests that hold KV cache.", lambda load: load.num_running),
    _Row("num_requests_waiting", "Requests queued in the engine.", lambda load: load.num_waiting),
    _Row(
        "num_waiting_prefill_tokens",
        "Prompt tokens of queued and running requests that are not computed yet.",
        lambda load: load.num_waiting_prefill_tokens,
    ),
)
_COUNTERS = (
    _Row("num_preemptions", "Times a request lost its KV cache to another.", lambda load: load.num_preemptions_total),
    _Row("recomputed_tokens", "Tokens computed twice because of that.", lambda load: load.num_recomputed_tokens_total),
    _Row(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda load: load.prefix_cache_queries_total,
    ),
    _Row("prefix_cache_hits", "Of these, tokens found.", lambda load: load.prefix_cache_hits_total),
    _Row(
        "engine_generated_tokens",
        "Output tokens the engine has drawn, sent to a client or not.",
        lambda load: load.num_generated_tokens_total,
    ),
    _Row("spec_decode_num_drafts", "Drafts that the engine has verified.", lambda load: load.num_drafts_total),
    _Row("spec_decode_num_draft_tokens", "Tokens of these drafts.", lambda load: load.num_draft_tokens_total),
    _Row(
        "spec_decode_num_accepted_tokens",
        "Of these tokens, those that the model drew too.",
        lambda load: load.num_accepted_tokens_total,
    ),
    _Row(
        "jit_compiles_after_ready",
        "GPU kernels compiled while requests waited; each is a defect.",
        lambda load: load.jit_compiles_after_ready_total,
    ),
    _Row(
        "integrity_checks",
        "KV cache consistency checks of the engine.",
        lambda load: load.integrity_checks_total,
    ),
)


class _LatencyRow(NamedTuple):
    name: str
    text: str
    value: Callable[[pb.LatencyStats], float]


_LATENCY_COUNTERS = (
    _LatencyRow(
        "step_time_stalls", "Steps that took far longer than predicted.", lambda latency: latency.num_stalls_total
    ),
    _LatencyRow(
        "infeasible_requests",
        "Requests that the engine ended because their latency targets could not be met.",
        lambda latency: latency.num_infeasible_total,
    ),
    _LatencyRow(
        "degraded_requests",
        "Requests that the engine made best effort for the same reason.",
        lambda latency: latency.num_degraded_total,
    ),
    _LatencyRow(
        "itl_infeasible_steps",
        "Steps that admitted no request with targets, to keep its inter-token target.",
        lambda latency: latency.num_itl_infeasible_total,
    ),
)
_ERRORS = ("step_time_error_ratio", "Relative error of predicted step times, stalls apart.")
_FAILURES = ("integrity_failures", "Failed KV cache consistency checks; the engine exits on a failure.")
_USAGE = ("kv_cache_usage_perc", "Share of the KV cache that cannot be allocated now, 0 to 1.")
_ADAPTERS = ("num_lora_adapters", "LoRA adapters that requests may name.")
_UP = ("engine_up", "1 while the engine is connected, else 0.")
_CACHE_INFO = ("cache_config_info", "The KV cache; always 1.")
_ENGINE_INFO = ("engine_info", "Which engine answers; always 1. A new instance_id means that it has restarted.")


class EngineCollector(Collector):
    """Collects from all engines.

    Args:
        prefix: of every name, without the colon.
        engines: all known engines; the sequence changes over time.
        failures: see `EngineMetrics`; entries stay, so that alerts stay visible.
    """

    def __init__(self, prefix: str, engines: Sequence[EngineMetrics], failures: Mapping[tuple[str, str], int]) -> None:
        self._prefix = prefix
        self._engines = engines
        self._failures = failures

    def collect(self) -> Iterator[Metric]:
        """Yields metric families with the samples of all engines that have reported."""
        up = self._gauge(*_UP, ("engine",))
        for engine in self._engines:
            up.add_metric((engine.engine,), float(engine.welcome is not None))
        yield up
        yield from self._infos()
        loads = [
            (
                (engine.welcome.info.model, engine.engine),
                engine.load,
                engine.welcome.info.num_kv_blocks,
                engine.has_counters,
            )
            for engine in self._engines
            if engine.welcome is not None and engine.load is not None
        ]
        usage = self._gauge(*_USAGE)
        for labels, load, num_blocks, _ in loads:
            if num_blocks:  # else the engine does not report the size of its cache
                usage.add_metric(labels, 1 - load.num_free_blocks / num_blocks)
        yield usage
        adapters = self._gauge(*_ADAPTERS)
        for engine in self._engines:
            if engine.welcome is not None:
                adapters.add_metric((engine.welcome.info.model, engine.engine), len(engine.adapters))
        yield adapters
        for row in _GAUGES:
            gauge = self._gauge(row.name, row.text)
            for labels, load, *_ in loads:
                gauge.add_metric(labels, row.value(load))
            yield gauge
        for row in _COUNTERS:
            counter = CounterMetricFamily(f"{self._prefix}:{row.name}", row.text, labels=LABELS)
            for labels, load, _, has_counters in loads:
                if has_counters:
                    counter.add_metric(labels, row.value(load))
            yield counter
        yield from self._latencies()
        failures = CounterMetricFamily(f"{self._prefix}:{_FAILURES[0]}", _FAILURES[1], labels=LABELS)
        for labels, num_failures in self._failures.items():
            failures.add_metric(labels, num_failures)
        yield failures

    def _latencies(self) -> Iterator[Metric]:
        reports = [
            ((engine.welcome.info.model, engine.engine), engine.latency)
            for engine in self._engines
            if engine.welcome is not None and engine.latency is not None
        ]
        name, text = _ERRORS
        errors = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=(*LABELS, "steps"))
        for labels, latency in reports:
            bounds = [*map(floatToGoString, latency.error_bounds), "+Inf"]
            for steps, counts, total in (
                ("decode", latency.decode_errors, latency.decode_error_sum),
                ("prompt", latency.prompt_errors, latency.prompt_error_sum),
            ):
                if len(counts) == len(bounds):  # else it is no engine of ours
                    errors.add_metric((*labels, steps), list(zip(bounds, accumulate(counts), strict=True)), total)
        yield errors
        for row in _LATENCY_COUNTERS:
            counter = CounterMetricFamily(f"{self._prefix}:{row.name}", row.text, labels=LABELS)
            for labels, latency in reports:
                counter.add_metric(labels, row.value(latency))
            yield counter

    def _infos(self) -> Iterator[Metric]:
        cache = self._gauge(*_CACHE_INFO, (*LABELS, "block_size", "num_gpu_blocks"))
        versions = self._gauge(*_ENGINE_INFO, (*LABELS, "instance_id", "engine_version", "weights_revision"))
        for engine in self._engines:
            if engine.welcome is not None:
                info = engine.welcome.info
                labels = (info.model, engine.engine)
                cache.add_metric((*labels, str(info.block_size), str(info.num_kv_blocks)), 1)
                instance_id = engine.welcome.engine_instance_id
                versions.add_metric((*labels, instance_id, info.engine_version, info.weights_revision), 1)
        yield cache
        yield versions

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = LABELS) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=labels)
