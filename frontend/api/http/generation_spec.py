"""Converts the parameters that all HTTP APIs share to a GenerationSpec."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.duration import from_nanoseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.service.sampling_fields import SAMPLING, Biases, Texts, TokenIds
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.bodies import SHARED_PARAMETERS, SamplingBody
from frontend.api.http.errors import BodyError

NO_LIMIT = 2**31 - 1
"""A max_tokens above every context length: the answer ends by itself, or when the context is full."""

_TRANSLATED: Mapping[str, Callable[[int], int | None]] = {
    "seed": lambda seed: None if seed == -1 else seed % 2**64,  # -1 is random, as in vLLM and llama.cpp
    "top_k": lambda top_k: max(top_k, 0),
}
"""Parameters whose values over HTTP have a wider range than the table; None leaves one unset."""

_MOST_SECONDS = 10**9
"""Above every allowed value, and within the range of a Duration."""


def sampling_spec(body: SamplingBody, request_id: str) -> pb.GenerationSpec:
    """Returns a GenerationSpec with the shared parameters and no prompt.

    Raises:
        BodyError: the time budget is not finite.
    """
    spec = pb.GenerationSpec(
        model=body.model, request_id=request_id, priority=body.priority or 0, cache_salt=body.cache_salt or ""
    )
    _set_parameters(spec, body)
    spec.stop.stop_texts.extend(body.stop_texts)
    if body.skip_special_tokens is False:
        spec.output.keep_special_tokens = True
    return spec


def _set_parameters(spec: pb.GenerationSpec, body: SamplingBody) -> None:
    """Sets the parameters of the shared table that the body has."""
    for name, row in SHARED_PARAMETERS.items():
        value = getattr(body, row.http_name)
        if value is not None and name in _TRANSLATED:
            value = _TRANSLATED[name](value)
        if value is None:
            continue
        message: Any = spec.sampling if name in SAMPLING else spec.stop
        if row.kind == Biases:
            getattr(message, name).update(value)
        elif row.kind in (TokenIds, Texts):
            getattr(message, name).extend(value)
        elif name == "time_budget_s":
            message.time_budget.CopyFrom(_time_budget(value))
        else:
            setattr(message, name, value)


def _time_budget(seconds: float) -> Duration:
    if not math.isfinite(seconds):
        raise BodyError(400, f"time_budget is {seconds}, it must be finite", param="time_budget")
    return from_nanoseconds(int(min(max(seconds, -_MOST_SECONDS), _MOST_SECONDS) * 1e9))
