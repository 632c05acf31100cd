"""What is said of a request when it ends."""

from chairlift.service.end_reason import EndReason
from engine.core.outputs import RequestCompletion
from engine.core.request import Request
from engine.core.time_account import time_account


def completion_of(request: Request, reason: EndReason, detail: str = "") -> RequestCompletion:
    """The completion of a request whose time has been charged up to now."""
    stopped_by_token = reason in (EndReason.END_TOKEN, EndReason.STOP_TOKEN)
    return RequestCompletion(
        reason=reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_output_tokens=len(request.output_ids),
        time=time_account(request),
        stop_token_id=request.output_ids[-1] if stopped_by_token else None,
        detail=detail,
    )
