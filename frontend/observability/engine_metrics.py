"""Metrics reported by one engine: its latest load, and histograms of its steps."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.observability.request_metrics import LABELS, RequestMetrics

_STEP_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class StepMetrics:
    """Histograms of the engine's steps.

    Args:
        prefix: of every name, without the colon.
        registry: where they are registered.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry) -> None:
        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=registry)

        self.step_s = histogram("engine_step_seconds", "Duration of steps that brought tokens here.", _STEP_BUCKETS)
        self.execute_s = histogram("engine_step_execute_seconds", "Of this, time in the model's runner.", _STEP_BUCKETS)
        self.num_tokens = histogram("iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKEN_BUCKETS)
        self.num_messages = Counter(
            f"{prefix}:engine_step_messages", "Messages with news of steps.", LABELS, registry=registry
        )
        self.num_merged = Counter(
            f"{prefix}:engine_merged_steps",
            "Steps whose news came in the message of a later step.",
            LABELS,
            registry=registry,
        )


@dataclass(frozen=True, slots=True)
class _Steps:
    step_s: Histogram
    execute_s: Histogram
    num_tokens: Histogram
    num_messages: Counter
    num_merged: Counter


class EngineMetrics:
    """Metrics of one engine.

    Args:
        engine: value of the label `engine`.
        steps: histograms of all engines.
        requests: initializes this engine's series to zero when its model is known.
        failures: (model, engine) -> failed KV cache consistency checks; kept here because an engine exits on the first
            one, and its own counter with it.

    Attributes:
        welcome: of the connected engine; None: it is not connected.
        load: its latest load; None: none has been received.
        latency: what its policy slo reported last; None: it has another policy.
        adapters: names of the adapters that it has.
        has_counters: whether its load has counters; those of other projects' engines have none.
        model_name: of the engine connected now or last; None: none ever was.
    """

    def __init__(
        self, engine: str, steps: StepMetrics, requests: RequestMetrics, failures: dict[tuple[str, str], int]
    ) -> None:
        self.engine = engine
        self._failures = failures
        self._step_metrics = steps
        self._requests = requests
        self.welcome: pb.Welcome | None = None
        self.load: pb.LoadStats | None = None
        self.latency: pb.LatencyStats | None = None
        self.adapters: tuple[str, ...] = ()
        self.has_counters = True
        self.model_name: str | None = None
        self._instance_id = ""
        self._failures_seen = 0  # of this instance
        self._steps: _Steps | None = None
        self._last_step = 0

    def attach(self, welcome: pb.Welcome, *, has_counters: bool = True) -> None:
        """The engine has connected: a new instance, or the same one again."""
        self.welcome = welcome
        self.has_counters = has_counters
        self.load = self.latency = None
        self.adapters = tuple(adapter.name for adapter in welcome.info.adapters)
        self.model_name = welcome.info.model
        if welcome.engine_instance_id != self._instance_id:
            self._instance_id, self._failures_seen = welcome.engine_instance_id, 0
        self._last_step = 0
        labels = (welcome.info.model, self.engine)
        metrics = self._step_metrics
        self._steps = _Steps(
            metrics.step_s.labels(*labels),
            metrics.execute_s.labels(*labels),
            metrics.num_tokens.labels(*labels),
            metrics.num_messages.labels(*labels),
            metrics.num_merged.labels(*labels),
        )
        self._failures.setdefault(labels, 0)
        self._requests.series(*labels)
        self._requests.lost_engine.labels(*labels)
        self.note_status(welcome.status)

    def detach(self) -> None:
        """The connection to the engine was lost."""
        self.welcome = self.load = self.latency = self._steps = None

    def count_lost(self, num_requests: int) -> None:
        """Counts requests that lost this engine and are waiting for failover."""
        assert self.model_name is not None, "it was connected"
        self._requests.lost_engine.labels(self.model_name, self.engine).inc(num_requests)

    def note_status(self, status: pb.EngineStatus) -> None:
        """Stores the load of a heartbeat, and the adapters."""
        if status.HasField("adapters"):
            self.adapters = tuple(adapter.name for adapter in status.adapters.adapters)
        if status.HasField("load"):
            self._note_load(status.load)
        if status.HasField("latency"):
            self.latency = status.latency

    def note_step(self, step: pb.StepResult) -> None:
        """Counts a step's message and stores its load. Of several messages for one step the first is observed,
        of several steps in one message the last.
        """
        if self._steps is not None:
            self._steps.num_messages.inc()
            self._steps.num_merged.inc(max(step.num_steps, 1) - 1)
        if not step.HasField("load"):
            return
        load = step.load
        self._note_load(load)
        if self._steps is not None and step.engine_step > self._last_step:
            self._last_step = step.engine_step
            self._steps.step_s.observe(load.step_us / 1e6)
            self._steps.execute_s.observe(load.execute_us / 1e6)
            self._steps.num_tokens.observe(load.num_batched_tokens)

    def _note_load(self, load: pb.LoadStats) -> None:
        self.load = load
        if self.model_name is not None:
            num_new = max(load.integrity_failures_total - self._failures_seen, 0)
            self._failures[self.model_name, self.engine] += num_new
        self._failures_seen = load.integrity_failures_total
