"""How a request spends its time, when it ends, and what must hold while it is live.

Stop texts are matched by the frontend; this module sees token ids only. The token that ends an answer is part of the
output. An end or stop token counts only from the `min_tokens`-th output token on: the sampler draws none earlier, but
the output with which a request arrives may contain one.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from enum import IntEnum

from chairlift.service.end_reason import EndReason
from engine.core.config import SchedulerConfig
from engine.core.outputs import (
    PromptLogprobs,
    RequestCompletion,
    RequestOutput,
    ScheduledRow,
    TimeAccount,
    TokenLogprobs,
)
from engine.core.request import Request, RequestStatus
from engine.errors import IntegrityError, InvalidRequest, RequestTooLong


def check_prompt(num_tokens: int, config: SchedulerConfig) -> None:
    """Checks the length of a prompt.

    Raises:
        InvalidRequest: it is empty.
        RequestTooLong: it leaves no room for a single new token.
    """
    if num_tokens == 0:
        raise InvalidRequest("prompt has no tokens")
    if num_tokens >= config.max_model_len:
        raise RequestTooLong(
            f"prompt has {num_tokens} tokens, max_model_len is {config.max_model_len} "
            f"with the answer (the cache holds {config.num_cache_tokens})"
        )


def finish_reason(request: Request, end_token_ids: frozenset[int]) -> EndReason | None:
    """Returns why a request finishes with its newest token, or None if it continues.

    Args:
        request: with `max_num_tokens` set; it may have no output yet.
        end_token_ids: the model's end tokens.
    """
    params = request.params
    output_ids = request.output_ids
    if output_ids and len(output_ids) >= params.min_tokens:
        token_id = output_ids[-1]
        if token_id in end_token_ids and not params.ignore_end_token:
            return EndReason.END_TOKEN
        if token_id in params.stop_token_ids:
            return EndReason.STOP_TOKEN
    if len(request.prompt_ids) + len(output_ids) < request.max_num_tokens:
        return None
    return EndReason.MAX_TOKENS if len(output_ids) >= params.max_tokens else EndReason.CONTEXT_FULL


def completion_of(request: Request, reason: EndReason, detail: str = "") -> RequestCompletion:
    """Returns the completion of a request whose time has been charged until now."""
    stopped_by_token = reason in (EndReason.END_TOKEN, EndReason.STOP_TOKEN)
    return RequestCompletion(
        reason,
        len(request.prompt_ids),
        max(0, request.num_cached_tokens),
        len(request.output_ids),
        time_account(request),
        request.output_ids[-1] if stopped_by_token else None,
        detail,
    )


def completion_output(request: Request, completion: RequestCompletion) -> RequestOutput:
    """Returns the last output of a request, without a token."""
    return RequestOutput(request.request_id, len(request.output_ids), (), completion=completion)


def prompt_output(request: Request, row: ScheduledRow, tokens: tuple[TokenLogprobs, ...]) -> RequestOutput:
    """Returns the log-probabilities of the prompt tokens of a row."""
    logprobs = PromptLogprobs(row.prompt_logits(request.num_prompt_tokens).start + 1, tokens)
    return RequestOutput(request.request_id, len(request.output_ids), (), prompt_logprobs=logprobs)


class _Kind(IntEnum):
    """Activities of a request, in the order of the fields of `TimeAccount` and of `Request.spent_s`."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PAUSED = 3
    PREEMPTED = 4


def charge_time(request: Request, now_s: float) -> None:
    """Charges the time since the last call to the request's current activity. Call it before the activity changes."""
    elapsed_s = now_s - request.charged_until_s
    if elapsed_s > 0:
        request.spent_s[_kind(request)] += elapsed_s
        request.charged_until_s = now_s


def take_time_news(request: Request, now_s: float) -> TimeAccount:
    """Charges the time until now and returns the account, which is news no more."""
    charge_time(request, now_s)
    request.has_time_news = False
    return time_account(request)


def time_account(request: Request) -> TimeAccount:
    """Returns the time charged so far, by activity; the five add up to the time since arrival."""
    queued_s, prefill_s, decode_s, paused_s, preempted_s = request.spent_s
    return TimeAccount(queued_s, prefill_s, decode_s, paused_s, preempted_s, request.num_preemptions)


def _kind(request: Request) -> _Kind:
    """A request without credit counts as paused whether it is running or waiting."""
    if request.token_credit is not None and request.token_credit <= 0:
        return _Kind.PAUSED
    if request.status is RequestStatus.WAITING:
        return _Kind.QUEUED
    if request.status is RequestStatus.PREEMPTED:
        return _Kind.PREEMPTED
    return _Kind.PREFILL if request.first_token_s is None else _Kind.DECODE


def check_requests(
    live: Collection[Request],
    running: Collection[Request],
    waiting: Collection[Request],
    rows_in_flight: Sequence[Request],
) -> None:
    """Checks that every request is in exactly one queue and that its progress counters are consistent.

    Args:
        live: requests that were accepted and have not ended.
        running: requests with blocks.
        waiting: requests without blocks.
        rows_in_flight: the request of every row of every step in flight.
    Raises: IntegrityError: an inconsistency, with the request and the numbers.
    """
    places = sorted(request.request_id for request in (*running, *waiting))
    if places != sorted(request.request_id for request in live):
        raise IntegrityError(f"{len(live)} live requests, but {len(running)} running and {len(waiting)} waiting")
    running_ids, num_rows_of = {request.request_id for request in running}, Counter(rows_in_flight)
    for request in live:
        name, num_rows = f"request {request.request_id}", num_rows_of[request]
        is_running = request.request_id in running_ids
        if is_running != (request.status in (RequestStatus.RUNNING, RequestStatus.PAUSED)):
            raise IntegrityError(f"{name} has status {request.status.name}, in the running list: {is_running}")
        if request.num_rows_in_flight != num_rows:
            raise IntegrityError(f"{name} counts {request.num_rows_in_flight} rows in flight of {num_rows}")
        if not 0 <= request.num_pending_tokens <= num_rows:
            raise IntegrityError(f"{name} has {request.num_pending_tokens} pending tokens in {num_rows} rows")
        num_computable = request.num_tokens + request.num_pending_tokens if is_running else 0
        if not 0 <= request.num_computed_tokens <= num_computable:
            raise IntegrityError(f"{name} has {request.num_computed_tokens} of {num_computable} tokens computed")
        num_owed, num_asked = request.num_owed_logits, request.num_prompt_logits
        if num_asked < 0 or num_owed < 0 or (num_owed and request.num_computed_tokens > num_asked):
            raise IntegrityError(
                f"{name} has {request.num_computed_tokens} tokens computed, {num_asked} prompt logits, {num_owed} owed"
            )
        if request.num_tokens >= request.max_num_tokens:
            raise IntegrityError(f"{name} is not finished with {request.num_tokens} of {request.max_num_tokens} tokens")
