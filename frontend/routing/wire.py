"""Converts between the engine's protos and the frontend's types. `frontend/request` converts the public protos."""

import math
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason, reasons_by_value
from chairlift.service.sampling_fields import SAMPLING, STOPPING
from frontend.errors import (
    DeadlineExceeded,
    EngineFault,
    EngineUnavailable,
    FrontendError,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestError,
    RequestTooLong,
    TargetsInfeasible,
)
from frontend.request.constraints import Constraints
from frontend.request.request import GenerationRequest
from frontend.routing.logprobs import LogprobBatch
from frontend.routing.stream import CancelReason, RequestEnd
from frontend.types import EngineAccount, EngineTime, LatencyTargets

_END_REASONS = reasons_by_value(pb.CompletionReason.items())
_CANCEL_REASONS = {
    CancelReason.CLIENT: pb.CANCEL_REASON_CLIENT,
    CancelReason.STOP_TEXT: pb.CANCEL_REASON_STOP_TEXT,
    CancelReason.DEADLINE: pb.CANCEL_REASON_DEADLINE,
    CancelReason.STALLED: pb.CANCEL_REASON_STALLED,
}
_PACING = {"gap": pb.PACING_GAP, "paced": pb.PACING_PACED}
_WHEN_INFEASIBLE = {
    "refuse": pb.WHEN_INFEASIBLE_REFUSE,
    "degrade": pb.WHEN_INFEASIBLE_DEGRADE,
    "wait": pb.WHEN_INFEASIBLE_WAIT,
}
_RETRY_ELSEWHERE_S = 1.0
_MAX_SUBMIT_BYTES = 1 << 20  # a single longer submission is sent alone: 2**20 tokens are 4 of a message's 16 MiB


class ProtocolViolation(FrontendError):  # noqa: N818 - reads as the reason it is
    """The engine violated the protocol; its stream is closed and opened again."""


# Messages to the engine.

# Parameters with the same name in the engine's proto.
_SAMPLING = [name for name in SAMPLING if name in pb.Sampling.DESCRIPTOR.fields_by_name]
_STOPPING = [name for name in STOPPING if name in pb.TokenStops.DESCRIPTOR.fields_by_name]


def submission(
    request: GenerationRequest,
    prompt_ids: Sequence[int],
    *,
    remaining_s: float | None,
    elapsed_s: float,
    constraints: Constraints | None = None,
) -> pb.Submission:
    """Makes a first submission (epoch 0, nothing generated yet), without handle and credit.

    Args:
        request: the checked request.
        prompt_ids: the prompt's token ids.
        remaining_s: seconds until the call's deadline; None without one.
        elapsed_s: seconds since the request was accepted, which reduce its time budget.
        constraints: structured output and banned sequences; None for neither.
    """
    constraints = constraints or Constraints()
    sampling, stop = request.sampling, request.stop
    message = pb.Submission(
        prompt_ids=ids_to_bytes(prompt_ids),
        sampling=pb.Sampling(
            **{name: getattr(sampling, name) for name in _SAMPLING},
            bias_ids=[token_id for token_id, _ in sampling.logit_bias],
            bias_values=[bias for _, bias in sampling.logit_bias],
            bad_sequences=[pb.TokenSequence(token_ids=ids) for ids in constraints.bad_sequences],
        ),
        stops=pb.TokenStops(
            **{name: getattr(stop, name) for name in _STOPPING},
            time_budget_ms=None if stop.time_budget_s is None else budget_ms(stop.time_budget_s - elapsed_s),
        ),
        remaining_ms=None if remaining_s is None else remaining_ms(remaining_s),
        priority=request.priority,
        cache_salt=request.cache_salt.encode(),
        top_logprobs=request.output.top_logprobs,
        prompt_logprobs=request.output.prompt_logprobs,
        request_id=request.request_id,
        grammar=constraints.grammar,
        adapter=request.adapter,
        adapter_sha256=request.adapter_sha256,
    )
    if request.targets is not None:
        _set_targets(message, request.targets, elapsed_s)
    return message


def _set_targets(submission: pb.Submission, targets: LatencyTargets, elapsed_s: float) -> None:
    submission.tenant = targets.tenant
    submission.service_class = targets.service_class
    if targets.ttft_s is not None:
        submission.ttft_remaining_ms = remaining_ms(targets.ttft_s - elapsed_s)
    if targets.inter_token_s is not None:
        submission.inter_token_us = min(max(round(targets.inter_token_s * 1e6), 1), 2**32 - 1)
    if targets.ttft_s is None and targets.inter_token_s is None and not targets.service_class:
        return
    submission.value = targets.value
    submission.pacing = _PACING[targets.pacing]
    submission.when_infeasible = _WHEN_INFEASIBLE[targets.when_infeasible]


def update_submission(
    submission: pb.Submission,
    *,
    epoch: int,
    output_ids: Sequence[int],
    waited_s: float,
    remaining_s: float | None,
    budget_s: float | None,
    ttft_s: float | None,
    has_prompt_logprobs: bool,
) -> None:
    """Turns a request's submission into its next one.

    Args:
        epoch: number of engines that took the request and were lost.
        output_ids: all tokens so far.
        waited_s: seconds since the request arrived.
        remaining_s, budget_s: seconds left until its deadline and of its time budget; None without them.
        ttft_s: seconds left until its first token is due, negative if it is late; None without such a target.
        has_prompt_logprobs: whether the prompt's log-probabilities are complete and not requested again.
    """
    submission.epoch = epoch
    submission.waited_ms = remaining_ms(waited_s)
    submission.output_ids = ids_to_bytes(output_ids)
    submission.start_index = len(output_ids)
    if remaining_s is not None:
        submission.remaining_ms = remaining_ms(remaining_s)
    if ttft_s is not None:
        submission.ttft_remaining_ms = remaining_ms(ttft_s)
    if budget_s is not None:
        submission.stops.time_budget_ms = budget_ms(budget_s)
    if has_prompt_logprobs:
        submission.ClearField("prompt_logprobs")


def commands(
    submissions: Sequence[pb.Submission],
    cancellations: Mapping[int, CancelReason],
    credits: Mapping[int, int],  # noqa: A002 - the wire's word
    acknowledged_step: int | None,
) -> Iterator[pb.AttachRequest]:
    """Encodes commands in sending order, without `command_seq`.

    Args:
        submissions: new requests, sent in batches far below the maximum message size.
        cancellations: reasons by handle.
        credits: tokens by handle.
        acknowledged_step: the last processed step; None if nothing new must be acknowledged.
    """
    for batch in _by_size(submissions):
        command = pb.AttachRequest()
        for submission in batch:
            # Constructors would copy by serializing and parsing, which is 25 times slower for a long prompt.
            command.submit.submissions.add().CopyFrom(submission)
        yield command
    for reason in dict.fromkeys(cancellations.values()):
        handles = [handle for handle, its_reason in cancellations.items() if its_reason is reason]
        yield pb.AttachRequest(cancel=pb.CancelBatch(handles=handles, reason=_CANCEL_REASONS[reason]))
    if credits:
        yield pb.AttachRequest(credit=pb.CreditGrant(handles=credits.keys(), tokens=credits.values()))
    if acknowledged_step is not None:
        yield pb.AttachRequest(ack=pb.StepAck(step_seq=acknowledged_step))


def _by_size(submissions: Sequence[pb.Submission]) -> Iterator[list[pb.Submission]]:
    batch: list[pb.Submission] = []
    size_bytes = 0
    for submission in submissions:
        submission_bytes = submission.ByteSize()
        if batch and size_bytes + submission_bytes > _MAX_SUBMIT_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(submission)
        size_bytes += submission_bytes
    if batch:
        yield batch


# Messages from the engine.


def rows(step: pb.StepResult) -> Iterator[tuple[int, int, int, list[int], LogprobBatch | None]]:
    """Yields the rows of a step: handle, epoch, index of the first token, tokens, log-probabilities.

    Raises:
        ProtocolViolation: the lengths of the columns differ.
    """
    handles, starts, token_ids = list(step.handles), list(step.start_indices), list(step.token_ids)
    counts = list(step.token_counts) or [1] * len(handles)
    epochs = list(step.epochs) or [0] * len(handles)
    if not (len(epochs) == len(starts) == len(counts) == len(handles) and sum(counts) == len(token_ids)):
        raise ProtocolViolation(
            f"step {step.step_seq}: {len(handles)} handles, {len(epochs)} epochs, {len(starts)} start_indices, "
            f"{len(counts)} token_counts of {sum(counts)} tokens, {len(token_ids)} token_ids"
        )
    logprobs = _row_logprobs(step.logprobs, counts) if step.logprobs.rows else {}
    position = 0
    for row, (handle, epoch, start, count) in enumerate(zip(handles, epochs, starts, counts, strict=True)):
        yield handle, epoch, start, token_ids[position : position + count], logprobs.get(row)
        position += count


def request_end(completion: pb.Completion) -> RequestEnd:
    """Converts the Completion of a request that completed.

    Raises:
        RequestError: the request failed, see `completion_error`.
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
    """Converts the final time report, for any end of a request."""
    return EngineAccount.at_end(engine_time(completion), completion.num_output_tokens)


def engine_time(account: pb.TimeAccount | pb.Completion) -> EngineTime:
    """Converts the time report of a request."""
    return EngineTime(
        queued_s=account.queued_us / 1e6,
        prefill_s=account.prefill_us / 1e6,
        parked_s=account.parked_us / 1e6,
        preempted_s=account.preempted_us / 1e6,
        num_preemptions=account.num_preemptions,
    )


def completion_error(completion: pb.Completion) -> RequestError:
    """Returns the error of a request that failed."""
    reason = _END_REASONS.get(completion.reason)
    if reason is EndReason.DEADLINE:
        return DeadlineExceeded(f"the deadline passed after {completion.num_output_tokens} output tokens")
    if reason is EndReason.INFEASIBLE:
        return TargetsInfeasible(completion.detail or "the first token can no longer be in time")
    if reason is EndReason.CANCELLED:
        return EngineUnavailable("the engine dropped this request", retry_after_s=_RETRY_ELSEWHERE_S)
    detail = completion.detail or pb.CompletionReason.Name(completion.reason)
    return EngineFault(f"the engine failed this request: {detail}")


def rejection_error(rejection: pb.Rejection) -> RequestError:
    """Returns the client's error for a Rejection."""
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
        case pb.REJECTION_REASON_NO_ADAPTER:
            return ModelNotFound("the model's adapter has been unloaded")
        case pb.REJECTION_REASON_INVALID:
            return InvalidRequest(rejection.detail, field="spec")
    return EngineFault(f"the engine refused this request without a known reason: {rejection.detail}")


def _row_logprobs(columns: pb.LogprobColumns, token_counts: Sequence[int]) -> dict[int, LogprobBatch]:
    """Returns the log-probabilities of the rows that have any, by row."""
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
    """Returns the log-probabilities of some prompt tokens; shares the message's columns."""
    return LogprobBatch(prompt.top_width, prompt.chosen, prompt.top_ids, prompt.top_values)


# Numbers.


def ids_to_bytes(token_ids: Sequence[int]) -> bytes:
    """Encodes token ids as unsigned 32-bit integers, little-endian."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def ids_from_bytes(packed: bytes) -> "array[int]":
    """Decodes token ids; see `ids_to_bytes`."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def budget_ms(left_s: float) -> int:
    """Returns the milliseconds left of a time budget; the engine ends a request at 0."""
    return max(math.ceil(left_s * 1000), 0)


def remaining_ms(remaining_s: float) -> int:
    """Returns the milliseconds until a point in time, 0 if it has passed. They are limited to the field's 32 bits
    because a client may send centuries.
    """
    return min(max(int(remaining_s * 1000), 0), 2**32 - 1)
