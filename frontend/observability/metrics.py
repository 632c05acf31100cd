"""All metrics of one frontend process, or of all workers together, and their text for Prometheus."""

from collections.abc import Callable
from itertools import count
from typing import Protocol

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, disable_created_metrics, generate_latest

from frontend.observability.engine_collector import EngineCollector
from frontend.observability.engine_metrics import EngineMetrics, StepMetrics
from frontend.observability.multiprocess import share_values, shared_collectors
from frontend.observability.request_metrics import RequestMetrics
from frontend.types import WorkerPlace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `render` returns: the format that every Prometheus reads."""


class Queue(Protocol):
    """The admission queue, as far as its length is exported."""

    on_change: Callable[[], None]
    num_requests: int
    num_tokens: int


class Metrics:
    """Everything that is counted here, and what is told of it.

    One of several workers tells the sums over all of them, whichever is asked. What the engine says of itself it tells
    as it hears it: every worker hears the same.

    Args:
        prefix: of every name, without the colon: "chairlift", or "vllm" for dashboards made for that.
        admission: the queue whose length is told.
        place: among the workers whose metrics are added up; None: there are no others.
    """

    def __init__(self, prefix: str, admission: Queue, place: WorkerPlace | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which says nothing
        own = CollectorRegistry()
        self._told = own if place is None else CollectorRegistry()
        if place is not None:
            share_values(place)
        self._engines: list[EngineMetrics] = []
        self._failures: dict[tuple[str, str], int] = {}
        self.requests = RequestMetrics(prefix, own)
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

            def note_queue() -> None:  # at every change, because the others cannot ask
                queued.set(admission.num_requests)
                tokens.set(admission.num_tokens)

            note_queue()
            admission.on_change = note_queue
            for collector in shared_collectors(place):
                self._told.register(collector)
        self._told.register(EngineCollector(prefix, self._engines, self._failures))

    def engine(self) -> EngineMetrics:
        """One more engine; its label is the lowest number that none has, from 0, as vLLM's."""
        taken = {engine.engine for engine in self._engines}
        label = next(label for label in map(str, count()) if label not in taken)
        engine = EngineMetrics(label, self._steps, self.requests, self._failures)
        self._engines.append(engine)
        return engine

    def drop_engine(self, engine: EngineMetrics) -> None:
        """An engine that will not come back; its number is free again."""
        self._engines.remove(engine)

    def note_without_engine(self, num_requests: int) -> None:
        """So many accepted requests have no engine now."""
        self._without_engine.set(num_requests)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._told)
