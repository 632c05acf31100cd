"""Exports what a gateway's endpoint picker asks of a model server: this frontend with all its engines as one endpoint.

The Gateway API Inference Extension and llm-d scrape every pod of an InferencePool and read one series per metric, the
first if there are several. Series with the label `engine` would therefore show one engine of many; these have no labels
and cover all attached engines. Without an engine they are absent, because an idle endpoint would attract requests.
Source: docs/proposals/003-model-server-protocol of kubernetes-sigs/gateway-api-inference-extension.
"""

import time
from collections.abc import Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontend.observability.engine_metrics import EngineMetrics

_CACHE_LABELS = ("block_size", "num_gpu_blocks")
_LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")


class EndpointCollector(Collector):
    """Collects from all engines at once.

    `lora_requests_info` has vLLM's name, labels and meaning of the value, the time of the report. Adapters are loaded
    by calls and not by requests, so `max_lora` is the number of adapters that are loaded, and none ever waits.

    Args:
        prefix: of every name, without the colon.
        engines: all known engines; the sequence changes over time.
    """

    def __init__(self, prefix: str, engines: Sequence[EngineMetrics]) -> None:
        self._prefix = prefix
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        """Yields metric families with one sample each, or with none while no engine has reported its load."""
        by_instance = {  # an engine with two addresses counts once
            engine.welcome.engine_instance_id: (engine.welcome.info, engine.load)
            for engine in self._engines
            if engine.welcome is not None and engine.load is not None
        }
        attached = list(by_instance.values())
        caches = [(info, load) for info, load in attached if info.num_kv_blocks]  # the others do not report their size
        waiting = self._gauge("endpoint_num_requests_waiting", "Requests queued in all engines.")
        running = self._gauge("endpoint_num_requests_running", "Requests that hold KV cache in any engine.")
        usage = self._gauge(
            "endpoint_kv_cache_usage_perc", "Share of all engines' KV cache that cannot be allocated now, 0 to 1."
        )
        cache = self._gauge("endpoint_cache_config_info", "All engines' KV cache; always 1.", _CACHE_LABELS)
        adapters = self._gauge("lora_requests_info", "LoRA adapters; the time of the report.", _LORA_LABELS)
        if attached:
            waiting.add_metric((), sum(load.num_waiting for _, load in attached))
            running.add_metric((), sum(load.num_running for _, load in attached))
            names = sorted({name for engine in self._engines if engine.welcome for name in engine.adapters})
            adapters.add_metric((str(len(names)), ",".join(names), ""), time.time())
        if caches:
            num_blocks = sum(info.num_kv_blocks for info, _ in caches)
            usage.add_metric((), 1 - sum(load.num_free_blocks for _, load in caches) / num_blocks)
            cache.add_metric((str(caches[0][0].block_size), str(num_blocks)), 1)
        yield from (waiting, running, usage, cache, adapters)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=labels)
