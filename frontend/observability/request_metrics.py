"""Counters and histograms of requests, with vLLM's names, labels and bucket bounds, and finer buckets below its first.

All of vLLM's bounds exist, so that queries over `le` written for vLLM work.
"""

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram

from frontend.errors import EngineUnavailable, InvalidRequest, ModelNotFound, RequestTooLong, error_reason
from frontend.observability.label_names import LabelNames
from frontend.observability.outcome import Outcome
from frontend.observability.traffic import Traffic

LABELS = ("model_name", "engine")
MAX_MODELS = 64
OTHER_MODELS = "other"

_TTFT_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_PHASE_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BUCKETS = (*(step * 10**power for power in range(6) for step in (1, 2, 5)), 10**6)
_N_BUCKETS = (1, 2, 5, 10, 20)
_PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20)


class RequestSeries:
    """Series of one model on one engine; they exist, at zero, from creation."""

    def __init__(self, metrics: "RequestMetrics", model_name: str, engine: str) -> None:
        labels = (model_name, engine)
        self.ends = {outcome: metrics.success.labels(model_name, engine, outcome.value) for outcome in Outcome}
        self.prompt_tokens = metrics.prompt_tokens.labels(*labels)
        self.prompt_tokens_cached = metrics.prompt_tokens_cached.labels(*labels)
        self.generation_tokens = metrics.generation_tokens.labels(*labels)
        self.first_token_s = metrics.first_token_s.labels(*labels)
        self.token_interval_s = metrics.token_interval_s.labels(*labels)
        self.time_per_token_s = metrics.time_per_token_s.labels(*labels)
        self.total_s = metrics.total_s.labels(*labels)
        self.queued_s = metrics.queued_s.labels(*labels)
        self.prefill_s = metrics.prefill_s.labels(*labels)
        self.decode_s = metrics.decode_s.labels(*labels)
        self.inference_s = metrics.inference_s.labels(*labels)
        self.num_prompt_tokens = metrics.num_prompt_tokens.labels(*labels)
        self.num_computed_tokens = metrics.num_computed_tokens.labels(*labels)
        self.num_generation_tokens = metrics.num_generation_tokens.labels(*labels)
        self.max_generation_tokens = metrics.max_generation_tokens.labels(*labels)
        self.params_n = metrics.params_n.labels(*labels)
        self.params_max_tokens = metrics.params_max_tokens.labels(*labels)
        self.num_preemptions = metrics.num_preemptions.labels(*labels)
        self.moved_s = metrics.moved_s.labels(*labels)


class RequestMetrics:
    """All metrics of requests; `request_meter.py` writes them.

    Invariants: received = refused + ended with any outcome + running; at most MAX_MODELS models and adapters have
    series of their own, the first ones that were asked for: adapters come and go, and each has 400 series per engine.

    Args:
        prefix: prefix of every name, without the colon.
        registry: registers them.
        folder: of the workers' metrics; None: a single process.

    Attributes:
        traffic: counts of this process for its throughput log.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry, folder: Path | None = None) -> None:
        self.traffic = Traffic()

        def counter(name: str, text: str, labels: tuple[str, ...] = LABELS) -> Counter:
            return Counter(f"{prefix}:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{prefix}:{name}", text, LABELS, buckets=buckets, registry=registry)

        self._series: dict[tuple[str, str], RequestSeries] = {}
        self._models = LabelNames(MAX_MODELS, folder and folder / "models.names")
        self.received = counter("requests_received", "Generation requests, whatever their outcome.", ())
        self.refused = counter(
            "requests_refused", "Requests refused for their content, or because no engine is connected.", ("reason",)
        )
        for kind in (InvalidRequest, RequestTooLong, ModelNotFound, EngineUnavailable):
            self.refused.labels(error_reason(kind("")))  # initialized to zero, or sums over it would have no value
        self.success = counter("request_success", "Accepted requests by how they ended.", (*LABELS, "finished_reason"))
        self.lost_engine = counter(
            "requests_lost_engine",
            "Requests that lost their engine and went to failover, by that engine.",
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens billed: of requests with an answer, whole or not.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Of these, tokens found in the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Output tokens billed: those sent to clients.")
        self.first_token_s = histogram(
            "time_to_first_token_seconds", "From acceptance to the first token.", _TTFT_BUCKETS
        )
        self.token_interval_s = histogram(
            "inter_token_latency_seconds", "From one output token to the next; even within a chunk.", _ITL_BUCKETS
        )
        self.time_per_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token after the first.", _ITL_BUCKETS
        )
        self.total_s = histogram("e2e_request_latency_seconds", "From acceptance to the end.", _PHASE_BUCKETS)
        self.queued_s = histogram(
            "request_queue_time_seconds", "From acceptance to the first step, tokenizing included.", _PHASE_BUCKETS
        )
        self.prefill_s = histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _PHASE_BUCKETS
        )
        self.decode_s = histogram(
            "request_decode_time_seconds", "From the first token to the last one.", _PHASE_BUCKETS
        )
        self.inference_s = histogram("request_inference_time_seconds", "Prefill and decode together.", _PHASE_BUCKETS)
        self.num_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKEN_BUCKETS)
        self.num_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens not found in the prefix cache.", _TOKEN_BUCKETS
        )
        self.num_generation_tokens = histogram("request_generation_tokens", "Output tokens sent.", _TOKEN_BUCKETS)
        self.max_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Output tokens of a request's longest answer.", _TOKEN_BUCKETS
        )
        self.params_n = histogram("request_params_n", "Requested answers (n).", _N_BUCKETS)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Effective limit on output tokens.", _TOKEN_BUCKETS
        )
        self.moved_s = histogram(
            "request_moved_time_seconds",
            "Failover: from the last step of the lost engine to the first step of the next one.",
            _PHASE_BUCKETS,
        )
        self.num_preemptions = histogram(
            "request_num_preemptions", "Times a request lost its KV cache and was recomputed.", _PREEMPTION_BUCKETS
        )

    def series(self, model_name: str, engine: str) -> RequestSeries:
        """Returns the series of one model on one engine; those of OTHER_MODELS beyond MAX_MODELS."""
        if not self._models.admits(model_name):
            model_name = OTHER_MODELS
        key = (model_name, engine)
        if key not in self._series:
            self._series[key] = RequestSeries(self, model_name, engine)
        return self._series[key]

    def shed(self, model_name: str, engine: str, num_requests: int) -> None:
        """Counts requests that got no place in the admission queue on arrival."""
        self.received.inc(num_requests)
        self.series(model_name, engine).ends[Outcome.SHED].inc(num_requests)
        self.traffic.num_rejected += num_requests

    def refuse(self, error: BaseException, num_requests: int) -> None:
        """Counts requests that were refused before they were checked."""
        self.received.inc(num_requests)
        self.refused.labels(error_reason(error)).inc(num_requests)
        self.traffic.num_rejected += num_requests
