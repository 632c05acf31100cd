"""Latency targets of a submission: protocol to dataclass."""

import math

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.latency.targets import LatencyTargets, Pacing, WhenInfeasible
from engine.errors import InvalidRequest
from engine.serving.checks import check_length

MAX_SERVICE_CLASS_BYTES = 64

_PACING = {
    pb.PACING_UNSPECIFIED: Pacing.GAP,
    pb.PACING_GAP: Pacing.GAP,
    pb.PACING_PACED: Pacing.PACED,
}
_WHEN_INFEASIBLE = {
    pb.WHEN_INFEASIBLE_UNSPECIFIED: WhenInfeasible.WAIT,
    pb.WHEN_INFEASIBLE_REFUSE: WhenInfeasible.REFUSE,
    pb.WHEN_INFEASIBLE_DEGRADE: WhenInfeasible.DEGRADE,
    pb.WHEN_INFEASIBLE_WAIT: WhenInfeasible.WAIT,
}


def targets_from_submission(submission: pb.Submission) -> LatencyTargets | None:
    """Returns the latency targets of a submission; None: it has neither targets nor a service class.

    A request that moved from another engine is never refused: its client was promised an answer.

    Raises: InvalidRequest: a field has an invalid value.
    """
    has_ttft, has_inter_token = submission.HasField("ttft_remaining_ms"), submission.HasField("inter_token_us")
    if not (has_ttft or has_inter_token or submission.service_class):
        return None
    check_length("service_class", len(submission.service_class.encode()), MAX_SERVICE_CLASS_BYTES, "bytes")
    if has_inter_token and not submission.inter_token_us:
        raise InvalidRequest("inter_token_us is 0, it must be above 0")
    value = submission.value if submission.HasField("value") else 1.0
    if not 0 < value < math.inf:
        raise InvalidRequest(f"value is {value:g}, it must be a finite number above 0")
    pacing = _PACING.get(submission.pacing)
    if pacing is None:
        raise InvalidRequest(f"pacing is {submission.pacing}, this engine knows {sorted(_PACING)}")
    when_infeasible = _WHEN_INFEASIBLE.get(submission.when_infeasible)
    if when_infeasible is None:
        raise InvalidRequest(
            f"when_infeasible is {submission.when_infeasible}, this engine knows {sorted(_WHEN_INFEASIBLE)}"
        )
    if submission.epoch and when_infeasible is WhenInfeasible.REFUSE:
        when_infeasible = WhenInfeasible.WAIT
    return LatencyTargets(
        ttft_s=submission.ttft_remaining_ms / 1e3 if has_ttft else None,
        inter_token_s=submission.inter_token_us / 1e6 if has_inter_token else None,
        pacing=pacing,
        when_infeasible=when_infeasible,
        value=value,
        service_class=submission.service_class,
    )
