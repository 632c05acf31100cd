"""Protocol to dataclass: a Submission becomes a `Request`, or an error with the field, its value and the allowed range.

Every field is checked here, before the scheduler, so that an invalid request cannot fail a step. The scheduler checks
whether a request fits the context, the cache and the queue.
"""

from dataclasses import dataclass

import numpy as np

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import MAX_TENANT_BYTES
from chairlift.service.sampling_fields import ENGINE_SAMPLING, STOPPING
from engine.core.request import Request, RequestId, SamplingParams
from engine.errors import InvalidRequest
from engine.serving.checks import check_length, check_parameter, check_vocabulary
from engine.serving.convert_constraint import check_constraint, constraint_from_submission
from engine.serving.convert_targets import targets_from_submission

MAX_CACHE_SALT_BYTES = 1024
MAX_REQUEST_ID_CHARS = 256

_SAMPLING = [name for name in ENGINE_SAMPLING if name in pb.Sampling.DESCRIPTOR.fields_by_name]  # all but logit_bias


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of the model that a request is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_logprobs: most alternatives per token.
        end_token_ids: end tokens of the model.
    """

    vocab_size: int
    max_logprobs: int
    end_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, info: pb.EngineInfo) -> "RequestLimits":
        """Returns the limits that an engine announces."""
        return cls(info.vocab_size, info.max_logprobs, frozenset(info.end_token_ids))


def request_from_submission(
    submission: pb.Submission, request_id: RequestId, limits: RequestLimits, now_s: float, session: int = 0
) -> Request:
    """Checks a submission and converts it to a request.

    Args:
        submission: as received.
        request_id: the engine's id of the request.
        limits: limits of the model.
        now_s: time of arrival, monotonic seconds.
        session: id of the session that submitted it.
    Returns: a request for `Scheduler.add_request`. Two things are still missing: the constraint of a grammar,
        which is compiled later, and the adapter.
    Raises: InvalidRequest: a field has an invalid value.
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
    check_length("cache_salt", len(submission.cache_salt), MAX_CACHE_SALT_BYTES, "bytes")
    check_length("request_id", len(submission.request_id), MAX_REQUEST_ID_CHARS, "characters")
    check_length("tenant", len(submission.tenant.encode()), MAX_TENANT_BYTES, "bytes")
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
        targets=targets_from_submission(submission),
        tenant=submission.tenant,
    )


def _sampling_params(submission: pb.Submission, limits: RequestLimits) -> SamplingParams:
    sampling, stops = submission.sampling, submission.stops
    values = {name: getattr(sampling, name) for name in _SAMPLING} | {"logit_bias": _logit_bias(sampling)}
    for name, value in values.items():
        check_parameter(f"sampling.{name}", ENGINE_SAMPLING[name], value, limits.vocab_size)
    if sampling.top_k >= limits.vocab_size:
        values["top_k"] = 0
    if stops.max_tokens < 1:
        raise InvalidRequest("stops.max_tokens is 0: at least 1 is needed")
    if stops.min_tokens > stops.max_tokens:
        raise InvalidRequest(f"stops.min_tokens is {stops.min_tokens}, stops.max_tokens only {stops.max_tokens}")
    check_parameter("stops.stop_token_ids", STOPPING["stop_token_ids"], stops.stop_token_ids, limits.vocab_size)
    top_logprobs = submission.top_logprobs if submission.HasField("top_logprobs") else None
    prompt_logprobs = submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None
    for name, width in (("top_logprobs", top_logprobs), ("prompt_logprobs", prompt_logprobs)):
        if width is not None and width > limits.max_logprobs:
            raise InvalidRequest(f"{name} is {width}, the engine's max_logprobs is {limits.max_logprobs}")
    return SamplingParams(
        **values,
        max_tokens=stops.max_tokens,
        # Under a grammar the constraint applies these two, because nothing else may be allowed: see `HeldBackEnds`.
        min_tokens=0 if submission.grammar else stops.min_tokens,
        ignore_end_token=stops.ignore_end_token and not submission.grammar,
        stop_token_ids=tuple(stops.stop_token_ids),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(sampling: pb.Sampling) -> tuple[tuple[int, float], ...]:
    ids, values = tuple(sampling.bias_ids), tuple(sampling.bias_values)
    if len(ids) != len(values):
        raise InvalidRequest(f"sampling.bias_ids has {len(ids)} entries, sampling.bias_values {len(values)}")
    if len(set(ids)) != len(ids):
        raise InvalidRequest(f"sampling.bias_ids names a token twice: {len(ids)} entries, {len(set(ids))} tokens")
    return tuple(zip(ids, values, strict=True))


def _ids_from_bytes(field: str, data: bytes, vocab_size: int) -> list[int]:
    if len(data) % 4:
        raise InvalidRequest(f"{field} has {len(data)} bytes: not a multiple of 4")
    ids = np.frombuffer(data, dtype="<u4")
    if ids.size:
        check_vocabulary(field, int(ids.max()), vocab_size)
    token_ids: list[int] = ids.tolist()
    return token_ids
