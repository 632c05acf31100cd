"""Converts sampling and stopping options between the public proto and checked dataclasses, by the table of fields."""

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from google.protobuf.duration import from_nanoseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.service.sampling_fields import (
    SAMPLING,
    STOPPING,
    Biases,
    Parameter,
    SamplingOptions,
    StopOptions,
    Texts,
    TokenIds,
)
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import InvalidRequest, RequestTooLong
from frontend.request.checks import check_has_tokens, check_range, duration_s
from frontend.request.request import GenerationRequest
from frontend.text.served_model import ServedModel

_REPEATED = (TokenIds, Texts, Biases)
_Message = pb.SamplingOptions | pb.StopOptions


def sampling_options(message: pb.SamplingOptions, model: ServedModel) -> SamplingOptions:
    """Checks the sampling options and fills in the defaults of the model and the API.

    Raises:
        InvalidRequest: names the field, its value and the allowed range.
    """
    defaults = {**model.defaults, "seed": secrets.randbits(64)}
    return SamplingOptions(**_checked_values(message, SAMPLING, defaults, model, "spec.sampling."))


def stop_options(message: pb.StopOptions, model: ServedModel, *, may_be_empty: bool) -> StopOptions:
    """Checks the stopping options.

    Args:
        may_be_empty: whether max_tokens may be 0, because the prompt itself is returned.

    Raises:
        InvalidRequest: names the field, its value and the allowed range.
        RequestTooLong: max_tokens alone exceeds the model's context.
    """
    stop = StopOptions(**_checked_values(message, STOPPING, {}, model, "spec.stop."))
    if stop.max_tokens is not None:
        if stop.max_tokens < 1 and not may_be_empty:
            raise InvalidRequest(
                "max_tokens is 0, it must be at least 1 without echo or prompt_logprobs", field="spec.stop.max_tokens"
            )
        if stop.max_tokens >= model.max_model_len:
            raise RequestTooLong(
                f"This model's maximum context length is {model.max_model_len} tokens, of which at least 1 is prompt; "
                f"max_tokens is {stop.max_tokens}",
                field="spec.stop.max_tokens",
            )
    most = model.max_model_len if stop.max_tokens is None else stop.max_tokens
    check_range("spec.stop.min_tokens", stop.min_tokens, 0, most)
    return stop


def effective_sampling(request: GenerationRequest) -> pb.SamplingOptions:
    """Returns all effective sampling values."""
    values = {name: getattr(request.sampling, name) for name in SAMPLING}
    return pb.SamplingOptions(**{**values, "logit_bias": dict(request.sampling.logit_bias)})


def effective_stop(request: GenerationRequest) -> pb.StopOptions:
    """Returns the effective stopping values, with the final max_tokens."""
    stop = replace(request.stop, max_tokens=0) if request.prompt_only else request.stop
    values = {parameter.public_name: getattr(stop, name) for name, parameter in STOPPING.items()}
    if stop.time_budget_s is not None:
        values["time_budget"] = from_nanoseconds(round(stop.time_budget_s * 1e9))
    return pb.StopOptions(**values)


def _checked_values(
    message: _Message, table: Mapping[str, Parameter], defaults: Mapping[str, Any], model: ServedModel, path: str
) -> dict[str, Any]:
    values = {}
    for name, parameter in table.items():
        field = path + parameter.public_name
        value = _value(message, parameter, field)
        if value is None:
            value = defaults.get(name)
        if value is None:
            values[name] = parameter.default
            continue
        problem = parameter.problem(value, model.vocab_size)
        if problem is not None:
            raise InvalidRequest(f"{parameter.public_name} {problem}", field=field)
        if parameter.kind == Texts:
            check_has_tokens(field, model)
        values[name] = _without_repetition(parameter, value)
    return values


def _value(message: _Message, parameter: Parameter, field: str) -> Any:
    """Returns the value that a message sets, or None."""
    name = parameter.public_name
    if parameter.kind in _REPEATED:
        value = getattr(message, name)
        if not value:
            return None
        return tuple(sorted(value.items())) if parameter.kind == Biases else value
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return None
    value = getattr(message, name)
    return duration_s(value, name, field) if isinstance(value, Duration) else value


def _without_repetition(parameter: Parameter, value: Any) -> Any:
    if parameter.kind == TokenIds:
        return tuple(sorted(set(value)))
    return tuple(dict.fromkeys(value)) if parameter.kind == Texts else value
