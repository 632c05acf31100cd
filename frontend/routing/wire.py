"""The engine's protos to and from what the frontend works with; the public ones are `frontend/request/convert.py`'s."""

import math
import sys
from array import array
from collections.abc import Sequence

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason, reasons_by_value
from frontend.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    RequestError,
    RequestTooLong,
)
from frontend.request.constraints import Constraints
from frontend.request.request import GenerationRequest
from frontend.routing.logprobs import LogprobBatch
from frontend.routing.stream import RequestEnd
from frontend.types import EngineAccount, EngineTime

_END_REASONS = reasons_by_value(pb.CompletionReason.items())
_RETRY_ELSEWHERE_S = 1.0


def submission(
    request: GenerationRequest,
    prompt_ids: Sequence[int],
    *,
    max_tokens: int,
    remaining_s: float | None,
    elapsed_s: float,
    constraints: Constraints | None = None,
) -> pb.Submission:
    """A first submission (epoch 0, nothing generated yet), without handle and credit: the session sets these.

    Args:
        max_tokens: the effective limit.
        remaining_s: seconds until the call's deadline; None if it has none.
        elapsed_s: seconds since the request was accepted, which its time budget no longer has.
        constraints: what its answer is held to; None: nothing.
    """
    constraints = constraints or Constraints()
    sampling, stop = request.sampling, request.stop
    return pb.Submission(
        prompt_ids=ids_to_bytes(prompt_ids),
        sampling=pb.Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            bias_ids=[token_id for token_id, _ in sampling.logit_bias],
            bias_values=[bias for _, bias in sampling.logit_bias],
            allowed_token_ids=sampling.allowed_token_ids,
            bad_sequences=[pb.TokenSequence(token_ids=ids) for ids in constraints.bad_sequences],
        ),
        stops=pb.TokenStops(
            max_tokens=max_tokens,
            min_tokens=stop.min_tokens,
            stop_token_ids=stop.stop_token_ids,
            ignore_end_token=stop.ignore_end_token,
            time_budget_ms=None if stop.time_budget_s is None else budget_ms(stop.time_budget_s - elapsed_s),
        ),
        remaining_ms=None if remaining_s is None else remaining_ms(remaining_s),
        priority=request.priority,
        cache_salt=request.cache_salt.encode(),
        top_logprobs=request.output.top_logprobs,
        prompt_logprobs=request.output.prompt_logprobs,
        request_id=request.request_id,
        grammar=constraints.grammar,
    )


def request_end(completion: pb.Completion) -> RequestEnd:
    """What a Completion says of a request that ended well.

    Raises:
        DeadlineExceeded: the deadline passed in the engine.
        EngineUnavailable: the engine gave the request up, as it does when it stops.
        EngineFault: the engine failed it.
    """
    reason = _END_REASONS.get(completion.reason)
    if reason is None or not reason.is_complete:
        raise completion_error(completion)
    return RequestEnd(
        reason=reason,
        stop_token_id=completion.stop_token_id,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_cached_tokens=completion.num_cached_tokens,
        num_output_tokens=completion.num_output_tokens,
    )


def engine_account(completion: pb.Completion) -> EngineAccount:
    """What a Completion says of any request, however it ended."""
    return EngineAccount.at_end(engine_time(completion), completion.num_output_tokens)


def engine_time(account: pb.TimeAccount | pb.Completion) -> EngineTime:
    """What the engine says of a request that goes on, or has ended."""
    return EngineTime(
        queued_s=account.queued_us / 1e6,
        prefill_s=account.prefill_us / 1e6,
        parked_s=account.parked_us / 1e6,
        preempted_s=account.preempted_us / 1e6,
        num_preemptions=account.num_preemptions,
    )


def completion_error(completion: pb.Completion) -> RequestError:
    """What a Completion says of a request that ended badly."""
    reason = _END_REASONS.get(completion.reason)
    if reason is EndReason.DEADLINE:
        return DeadlineExceeded(f"the deadline passed after {completion.num_output_tokens} output tokens")
    if reason is EndReason.CANCELLED:
        return EngineUnavailable("the engine gave this request up", retry_after_s=_RETRY_ELSEWHERE_S)
    detail = completion.detail or pb.CompletionReason.Name(completion.reason)
    return EngineFault(f"the engine failed this request: {detail}")


def rejection_error(rejection: pb.Rejection) -> RequestError:
    """The error a Rejection means for the client."""
    retry_after_s = _RETRY_ELSEWHERE_S
    if rejection.HasField("retry_after"):
        retry_after_s = rejection.retry_after.ToTimedelta().total_seconds()
    match rejection.reason:
        case pb.REJECTION_REASON_QUEUE_FULL:
            return QueueFull(rejection.detail, retry_after_s=retry_after_s)
        case pb.REJECTION_REASON_TOO_LONG:
            return RequestTooLong(rejection.detail, field="spec.prompt")
        case pb.REJECTION_REASON_DRAINING:
            return EngineUnavailable(rejection.detail, retry_after_s=retry_after_s)
        case pb.REJECTION_REASON_INVALID:
            return InvalidRequest(rejection.detail, field="spec")
    return EngineFault(f"the engine refused this request without a known reason: {rejection.detail}")


def row_logprobs(columns: pb.LogprobColumns, token_counts: Sequence[int]) -> dict[int, LogprobBatch]:
    """Log-probabilities per row.

    Args:
        columns: as in the StepResult.
        token_counts: tokens of every row of the step.
    Returns: row index -> its columns, for the rows that have any.
    """
    chosen, top_ids, top_values = list(columns.chosen), list(columns.top_ids), list(columns.top_values)
    batches = {}
    position = top_position = 0
    for row, width in zip(columns.rows, columns.top_widths, strict=True):
        end, top_end = position + token_counts[row], top_position + token_counts[row] * width
        batches[row] = LogprobBatch(
            width, chosen[position:end], top_ids[top_position:top_end], top_values[top_position:top_end]
        )
        position, top_position = end, top_end
    return batches


def prompt_columns(prompt: pb.PromptLogprobs) -> LogprobBatch:
    """The columns of some tokens of a prompt."""
    return LogprobBatch(prompt.top_width, list(prompt.chosen), list(prompt.top_ids), list(prompt.top_values))


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as the wire has them."""
    ids = array("I", token_ids)  # of another array it is a mere copy
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def budget_ms(left_s: float) -> int:
    """What is left of a time budget."""
    return max(math.ceil(left_s * 1000), 0)  # one that is used up is the engine's to end, like any other


def remaining_ms(remaining_s: float) -> int:
    """What is left until a deadline, or any other time that is never too long."""
    # A client may say "for ever" with a deadline of centuries; the field has 32 bits.
    return min(max(int(remaining_s * 1000), 0), 2**32 - 1)
