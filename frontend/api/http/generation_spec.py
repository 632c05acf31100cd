"""Converts the parameters that all HTTP APIs share to a GenerationSpec."""

import math

from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.bodies import SamplingBody
from frontend.api.http.errors import BodyError

NO_LIMIT = 2**31 - 1
"""A max_tokens above every context length: the answer ends by itself, or when the context is full."""

_MOST_SECONDS = 10**9
"""Above every allowed value, and within the range of a Duration."""


def sampling_spec(body: SamplingBody, request_id: str) -> pb.GenerationSpec:
    """The request with what all kinds of generation have in common, without a prompt.

    Raises:
        BodyError: a time budget that is not finite.
    """
    spec = pb.GenerationSpec(
        model=body.model, request_id=request_id, priority=body.priority or 0, cache_salt=body.cache_salt or ""
    )
    _set_sampling(spec.sampling, body)
    _set_stop(spec.stop, body)
    if body.skip_special_tokens is False:
        spec.output.keep_special_tokens = True
    return spec


def _set_sampling(sampling: pb.SamplingOptions, body: SamplingBody) -> None:
    for name, value in (
        ("temperature", body.temperature),
        ("top_p", body.top_p),
        ("min_p", body.min_p),
        ("repetition_penalty", body.repetition_penalty),
        ("presence_penalty", body.presence_penalty),
        ("frequency_penalty", body.frequency_penalty),
    ):
        if value is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(body.top_k, 0)  # -1 is vLLM's word for all
    if body.seed is not None:
        sampling.seed = body.seed % 2**64
    sampling.logit_bias.update(body.logit_bias or {})
    sampling.allowed_token_ids.extend(body.allowed_token_ids or [])
    sampling.bad_words.extend(body.bad_words or [])


def _set_stop(stop: pb.StopOptions, body: SamplingBody) -> None:
    stop.stop_texts.extend(body.stop_texts)
    stop.stop_token_ids.extend(body.stop_token_ids or [])
    stop.include_stop_text = bool(body.include_stop_str_in_output)
    stop.ignore_end_token = bool(body.ignore_eos)
    if body.min_tokens is not None:
        stop.min_tokens = body.min_tokens
    if body.time_budget is not None:
        if not math.isfinite(body.time_budget):
            raise BodyError(400, f"time_budget is {body.time_budget}, it must be finite", param="time_budget")
        bounded_s = min(max(body.time_budget, -_MOST_SECONDS), _MOST_SECONDS)
        stop.time_budget.FromNanoseconds(int(bounded_s * 1e9))
