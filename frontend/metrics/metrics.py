"""All metrics of one frontend process, and their text for Prometheus."""

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, generate_latest

from frontend.admission import Admission
from frontend.metrics.engine_collector import EngineCollector
from frontend.metrics.engine_metrics import EngineMetrics, StepMetrics
from frontend.metrics.request_metrics import RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns: the format that every Prometheus reads."""


class Metrics:
    """The registry of this process and everything in it.

    Args:
        prefix: of every name, without the colon: "chairlift", or "vllm" for dashboards made for that.
        admission: the queue whose length is told.
    """

    def __init__(self, prefix: str, admission: Admission) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which says nothing
        self._registry = CollectorRegistry()
        self._engines: list[EngineMetrics] = []
        self.requests = RequestMetrics(prefix, self._registry)
        self._steps = StepMetrics(prefix, self._registry)
        self._registry.register(EngineCollector(prefix, self._engines))
        queued = Gauge(
            f"{prefix}:frontend_queue_requests", "Requests without their first token.", registry=self._registry
        )
        queued.set_function(lambda: admission.num_requests)
        tokens = Gauge(f"{prefix}:frontend_queue_tokens", "Prompt tokens of these.", registry=self._registry)
        tokens.set_function(lambda: admission.num_tokens)
        ProcessCollector(registry=self._registry)

    def engine(self) -> EngineMetrics:
        """One more engine; its label counts from 0, as vLLM's."""
        engine = EngineMetrics(str(len(self._engines)), self._steps, self.requests)
        self._engines.append(engine)
        return engine

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
