"""What is said of a request when it ends."""

from engine.core.outputs import RequestCompletion
from engine.core.request import FinishReason, Request


def completion_of(request: Request, reason: FinishReason, now_s: float, detail: str = "") -> RequestCompletion:
    """The completion of a request that ends at `now_s`; a time that it never reached counts as zero or as until now."""
    started_s = now_s if request.first_scheduled_s is None else request.first_scheduled_s
    first_token_s = started_s if request.first_token_s is None else request.first_token_s
    stopped_by_token = reason in (FinishReason.END_TOKEN, FinishReason.STOP_TOKEN)
    return RequestCompletion(
        reason=reason,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(0, request.num_cached_tokens),
        num_output_tokens=len(request.output_ids),
        num_preemptions=request.num_preemptions,
        queued_s=max(0.0, started_s - request.arrival_s),
        prefill_s=first_token_s - started_s,
        stop_token_id=request.output_ids[-1] if stopped_by_token else None,
        detail=detail,
    )
