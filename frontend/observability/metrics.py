"""All metrics of one frontend process, or summed over its workers, in Prometheus' text format."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from frontend.observability.endpoint_collector import EndpointCollector
from frontend.observability.engine_collector import EngineCollector
from frontend.observability.engine_labels import EngineLabels
from frontend.observability.engine_metrics import EngineMetrics, StepMetrics
from frontend.observability.multiprocess import share_values, shared_collectors
from frontend.observability.request_metrics import RequestMetrics
from frontend.observability.target_metrics import TargetMetrics
from frontend.types import WorkerPlace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of `render`: the text format that every Prometheus version reads."""


class Queue(Protocol):
    """The admission queue, as far as its length is exported."""

    on_change: Callable[[], None]
    num_requests: int
    num_tokens: int


class Metrics:
    """Registry of all metrics.

    Any of several workers renders the sums over all of them. Engine metrics are not summed: every worker receives the
    same ones.

    Args:
        prefix: prefix of every name, without the colon: "chairlift", or "vllm" for vLLM's dashboards.
        admission: the queue whose length is exported.
        place: this worker among those whose metrics are summed; None: a single process.
    """

    def __init__(self, prefix: str, admission: Queue, place: WorkerPlace | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one useless series per metric
        own = CollectorRegistry()
        self._exported = own if place is None else CollectorRegistry()
        if place is not None:
            share_values(place)
        self._rendering = asyncio.Lock()
        self._engines: list[EngineMetrics] = []
        folder = place.metrics_folder if place is not None else None
        self._labels = EngineLabels(folder)
        self._failures: dict[tuple[str, str], int] = {}
        self.requests = RequestMetrics(prefix, own, folder)
        self.targets = TargetMetrics(prefix, own, folder)
        self._steps = StepMetrics(prefix, own)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{prefix}:{name}", text, registry=own, multiprocess_mode="livesum")

        queued = gauge("frontend_queue_requests", "Requests without their first token.")
        tokens = gauge("frontend_queue_tokens", "Prompt tokens of these.")
        self._without_engine = gauge("requests_without_engine", "Accepted requests that no engine has.")
        self._without_engine.set(0)
        if place is None:
            queued.set_function(lambda: admission.num_requests)
            tokens.set_function(lambda: admission.num_tokens)
            ProcessCollector(registry=own)
        else:

            def note_queue() -> None:  # at every change, because other workers cannot read it
                queued.set(admission.num_requests)
                tokens.set(admission.num_tokens)

            note_queue()
            admission.on_change = note_queue
            for collector in shared_collectors(place):
                self._exported.register(collector)
        engines = EngineCollector(prefix, self._engines, self._failures)
        self._reports = (engines, EndpointCollector(prefix, self._engines))

    def engine(self, address: str) -> EngineMetrics:
        """Adds the engine at an address; its label is a number, see `EngineLabels`."""
        engine = EngineMetrics(self._labels.take(address), self._steps, self.requests, self._failures)
        self._engines.append(engine)
        return engine

    def drop_engine(self, engine: EngineMetrics) -> None:
        """Removes an engine; its number becomes free."""
        self._engines.remove(engine)
        self._labels.free(engine.engine)

    def note_without_engine(self, num_requests: int) -> None:
        """Sets the number of accepted requests without an engine."""
        self._without_engine.set(num_requests)

    def render(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return self._text(self._reported())

    async def render_aside(self) -> bytes:
        """Returns the same from a thread: with many engines or adapters it takes longer than streams may be held up."""
        async with self._rendering:  # one at a time: each takes a part of the event loop's time
            return await asyncio.to_thread(self._text, self._reported())

    def _reported(self) -> list[Metric]:
        """Returns what engines have reported. Called on the event loop, which changes it."""
        return [metric for reports in self._reports for metric in reports.collect()]

    def _text(self, reported: list[Metric]) -> bytes:
        """Thread-safe, as the metrics of prometheus_client are."""
        return generate_latest(self._exported) + generate_latest(_Collected(reported))


class _Collected(Collector):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
