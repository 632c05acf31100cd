"""Latency targets of a request, as its service class and its client set them. Pure."""

from dataclasses import dataclass
from enum import Enum


class Pacing(Enum):
    """How gaps between tokens are judged.

    GAP: every gap is within the inter-token target. PACED: token k comes at most k inter-token targets after the first,
    so tokens that came early make up for later gaps.
    """

    GAP = "gap"
    PACED = "paced"


class WhenInfeasible(Enum):
    """What happens to a request that waits and can no longer meet its first-token target.

    REFUSE: it ends with an error that says so. DEGRADE, WAIT: it is served as best effort; WAIT is not counted as
    degraded.
    """

    REFUSE = "refuse"
    DEGRADE = "degrade"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """What a request asks for. Without `ttft_s` and `inter_token_s` it is best effort.

    Attributes:
        ttft_s: seconds from `Request.arrival_s` to the first token; what remained of them when the request arrived.
        inter_token_s: seconds between tokens.
        pacing: how gaps are judged.
        when_infeasible: what happens if `ttft_s` cannot be met.
        value: of meeting the targets, relative to other requests; the weight of its service class.
        service_class: name; lengths of answers are learned by class.
    """

    ttft_s: float | None = None
    inter_token_s: float | None = None
    pacing: Pacing = Pacing.GAP
    when_infeasible: WhenInfeasible = WhenInfeasible.WAIT
    value: float = 1.0
    service_class: str = ""
