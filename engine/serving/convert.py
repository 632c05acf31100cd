"""Wire to dataclass: a Submission becomes a `Request` or an error that names the field and the numbers.

Everything a frontend can get wrong is caught here, before the scheduler, so that one bad request cannot hurt a step.
Whether a request fits the context, the cache and the queue is for the scheduler to say.
"""

import math
from dataclasses import dataclass

import numpy as np

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import InvalidRequest
from engine.serving.convert_constraint import check_constraint, constraint_from_submission

MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CACHE_SALT_BYTES = 1024
MAX_REQUEST_ID_CHARS = 256
MIN_REPETITION_PENALTY = 0.1
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What of the model a request is checked against.

    Attributes:
        vocab_size: ids must be smaller.
        max_logprobs: most alternatives per token.
        end_token_ids: of the model.
    """

    vocab_size: int
    max_logprobs: int
    end_token_ids: frozenset[int] = frozenset()


def request_from_submission(
    submission: pb.Submission, request_id: RequestId, limits: RequestLimits, now_s: float, session: int = 0
) -> Request:
    """Checks a submission and turns it into a request.

    Args:
        submission: as received.
        request_id: the engine's name for it.
        limits: of the model and the configuration.
        now_s: monotonic seconds, the arrival.
        session: whose it is.
    Returns: a request ready for `Scheduler.add_request`, except that one with a grammar lacks its constraint: compiling
        takes time.
    Raises: InvalidRequest: a field has a value that cannot be served; the message names both.
    """
    prompt_ids = _ids_from_bytes("prompt_ids", submission.prompt_ids, limits.vocab_size)
    if not prompt_ids:
        raise InvalidRequest("prompt_ids is empty: at least 1 token is needed")
    output_ids = _ids_from_bytes("output_ids", submission.output_ids, limits.vocab_size)
    if submission.start_index != len(output_ids):
        raise InvalidRequest(f"start_index is {submission.start_index}, but output_ids has {len(output_ids)} tokens")
    if not submission.HasField("sampling"):
        raise InvalidRequest("sampling is missing: the frontend sets every value")
    if not submission.HasField("stops"):
        raise InvalidRequest("stops is missing: the frontend sets every value")
    stops = submission.stops
    check_constraint(submission, limits.vocab_size)
    _check_length("cache_salt", len(submission.cache_salt), MAX_CACHE_SALT_BYTES, "bytes")
    _check_length("request_id", len(submission.request_id), MAX_REQUEST_ID_CHARS, "characters")
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt_ids),
        params=_sampling_params(submission, limits),
        arrival_s=now_s,
        output_ids=output_ids,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        deadline_s=now_s + submission.remaining_ms / 1000 if submission.HasField("remaining_ms") else None,
        budget_end_s=now_s + stops.time_budget_ms / 1000 if stops.HasField("time_budget_ms") else None,
        token_credit=submission.token_credit or None,
        label=submission.request_id,
        session=session,
        has_moved=submission.epoch > 0,
        waited_s=submission.waited_ms / 1000,
        constraint=constraint_from_submission(submission, limits.vocab_size, limits.end_token_ids),
    )


def _sampling_params(submission: pb.Submission, limits: RequestLimits) -> SamplingParams:
    sampling, stops = submission.sampling, submission.stops
    _check_range("sampling.temperature", sampling.temperature, 0.0, math.inf)
    _check_range("sampling.top_p", sampling.top_p, 0.0, 1.0, above_low=True)
    _check_range("sampling.min_p", sampling.min_p, 0.0, 1.0)
    _check_range(
        "sampling.repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    )
    _check_range("sampling.presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _check_range("sampling.frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if stops.max_tokens < 1:
        raise InvalidRequest("stops.max_tokens is 0: at least 1 is needed")
    if stops.min_tokens > stops.max_tokens:
        raise InvalidRequest(f"stops.min_tokens is {stops.min_tokens}, stops.max_tokens only {stops.max_tokens}")
    _check_length("stops.stop_token_ids", len(stops.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    stop_token_ids = tuple(stops.stop_token_ids)
    _check_vocabulary("stops.stop_token_ids", max(stop_token_ids, default=0), limits.vocab_size)
    top_logprobs = submission.top_logprobs if submission.HasField("top_logprobs") else None
    prompt_logprobs = submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None
    for field, value in (("top_logprobs", top_logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > limits.max_logprobs:
            raise InvalidRequest(f"{field} is {value}, the engine's max_logprobs is {limits.max_logprobs}")
    return SamplingParams(
        seed=sampling.seed,
        max_tokens=stops.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k < limits.vocab_size else 0,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias(sampling, limits.vocab_size),
        # Under a grammar these give way where nothing else can be drawn, see `HeldBackEnds`.
        min_tokens=0 if submission.grammar else stops.min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=stops.ignore_end_token and not submission.grammar,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(sampling: pb.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    ids, values = tuple(sampling.bias_ids), tuple(sampling.bias_values)
    if len(ids) != len(values):
        raise InvalidRequest(f"sampling.bias_ids has {len(ids)} entries, sampling.bias_values {len(values)}")
    _check_length("sampling.bias_ids", len(ids), MAX_LOGIT_BIAS, "ids")
    _check_vocabulary("sampling.bias_ids", max(ids, default=0), vocab_size)
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"sampling.bias_ids names a token twice: {len(ids)} entries, {len(set(ids))} tokens")
    for value in values:
        _check_range("sampling.bias_values", value, -MAX_BIAS, MAX_BIAS)
    return tuple(zip(ids, values, strict=True))


def _ids_from_bytes(field: str, data: bytes, vocab_size: int) -> list[int]:
    if len(data) % 4:
        raise InvalidRequest(f"{field} has {len(data)} bytes: not a multiple of 4")
    ids = np.frombuffer(data, dtype="<u4")
    if ids.size:
        _check_vocabulary(field, int(ids.max()), vocab_size)
    token_ids: list[int] = ids.tolist()
    return token_ids


def _check_vocabulary(field: str, largest_id: int, vocab_size: int) -> None:
    if largest_id >= vocab_size:
        raise InvalidRequest(f"{field} contains token id {largest_id}, the vocabulary has {vocab_size}")


def _check_length(field: str, length: int, most: int, unit: str) -> None:
    if length > most:
        raise InvalidRequest(f"{field} has {length} {unit}, at most {most} are served")


def _check_range(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    if math.isfinite(value) and low <= value <= high and not (above_low and value == low):
        return
    bounds = f"{'above' if above_low else 'at least'} {low:g}" + (f" and at most {high:g}" if high != math.inf else "")
    raise InvalidRequest(f"{field} is {value:g}: must be finite, {bounds}")
