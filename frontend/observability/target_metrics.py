"""Metrics of latency targets: goodput by service class, retries, predictions, and tokens by tenant.

All stay at zero without classes and targets.
"""

from enum import Enum
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Histogram

from frontend.observability.label_names import LabelNames
from frontend.types import RetryResult

MAX_TENANTS = 20
OTHER_TENANTS = "other"

_ERROR_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class TargetOutcome(Enum):
    """What became of a request's targets."""

    MET = "met"
    TTFT_MISSED = "ttft_missed"
    ITL_MISSED = "itl_missed"
    DEGRADED = "degraded"
    REFUSED = "refused"


class TargetMetrics:
    """Writes the metrics.

    Invariant: at most MAX_TENANTS tenants have series of their own: the first ones that were served.

    Args:
        prefix: prefix of every name, without the colon.
        registry: registers them.
        folder: of the workers' metrics; None: a single process.
    """

    def __init__(self, prefix: str, registry: CollectorRegistry, folder: Path | None = None) -> None:
        self._goodput = Counter(
            f"{prefix}:goodput_requests",
            "Requests with a service class or targets, by class and whether the targets were met.",
            ("service_class", "outcome"),
            registry=registry,
        )
        self._retries = Counter(
            f"{prefix}:retry",
            "Refusals for latency targets, and retry tickets that came back, by result.",
            ("result",),
            registry=registry,
        )
        self._error_s = Histogram(
            f"{prefix}:ttft_prediction_error_seconds",
            "Absolute difference of the predicted and the actual time of a first token.",
            registry=registry,
            buckets=_ERROR_BUCKETS,
        )
        self._tenant_tokens = Counter(
            f"{prefix}:tenant_tokens",
            "Tokens of requests with a tenant, while there are service classes or targets.",
            ("tenant", "kind"),
            registry=registry,
        )
        self._tenants = LabelNames(MAX_TENANTS, folder and folder / "tenants.names")
        for result in RetryResult:  # initialized to zero, or sums over them would have no value
            self._retries.labels(result.value)
        for outcome in TargetOutcome:
            self._goodput.labels("", outcome.value)
        for kind in ("prompt", "output"):
            self._tenant_tokens.labels(OTHER_TENANTS, kind)

    def note_outcome(self, service_class: str, outcome: TargetOutcome, num_requests: int = 1) -> None:
        """Counts requests by what became of their targets."""
        self._goodput.labels(service_class, outcome.value).inc(num_requests)

    def note_retry(self, result: RetryResult) -> None:
        """Counts a refusal or a ticket."""
        self._retries.labels(result.value).inc()

    def note_prediction(self, error_s: float) -> None:
        """Observes the seconds between the predicted and the actual first token."""
        self._error_s.observe(error_s)

    def note_tokens(self, tenant: str, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Counts the tokens of a request that has ended."""
        if not self._tenants.admits(tenant):
            tenant = OTHER_TENANTS
        self._tenant_tokens.labels(tenant, "prompt").inc(num_prompt_tokens)
        self._tenant_tokens.labels(tenant, "output").inc(num_output_tokens)
