"""vLLM's protocol to submissions: a GenerateRequest becomes `WantedAnswers`, or an error that names the field."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import MAX_GRAMMAR_CHARS
from chairlift.service.sampling_fields import ENGINE_SAMPLING, STOPPING, seed_of_answer
from chairlift.service.structured.output_constraint import ConstraintKind, OutputConstraint
from engine.errors import InvalidRequest, RequestTooLong
from engine.serving.checks import check_length, check_parameter, check_vocabulary
from engine.serving.convert import MAX_REQUEST_ID_CHARS, RequestLimits

MAX_ANSWERS = 128
"""Answers to one request (`n`)."""

_PATH = "sampling_params."
_REQUEST_FIELDS = frozenset({"request_id", "tokenized", "sampling_params", "stream"})
_SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_ABOUT_TEXT = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_SAMPLING_FIELDS = frozenset(
    {
        *(*_SAME_NAMES, "seed", "logit_bias", "n", "max_tokens", "min_tokens", "ignore_eos", "stop", "stop_token_ids"),
        *("logprobs", "prompt_logprobs", "json_schema", "json_object", "regex", "grammar", "choice"),
        "grammar_from_first_token",  # every grammar starts there
        *_ABOUT_TEXT,  # the engine sends token ids: these concern the gateway, which makes text of them
    }
)
_UNSET_IS_1 = frozenset({"top_p", "repetition_penalty"})  # they have no presence, and 0 would be invalid

_WHY_NOT: Mapping[str, str] = {
    "text": "the engine has no text: send token ids in tokenized.input_ids",
    "mm_inputs": "the engine serves text models",
    "extra_mm_inputs": "the engine serves text models",
    "media_refs": "the engine serves text models",
    "data_parallel_rank": "the engine is a single data-parallel rank",
    "kv_transfer_params": "the engine computes prompts itself",
    "kv_transfer_params_json": "the engine computes prompts itself",
    "truncate_prompt_tokens": "truncate the prompt before it is sent",
    "structural_tag": "send a grammar or a json_schema instead",
}


@dataclass(frozen=True, slots=True)
class WantedAnswers:
    """A checked request.

    Attributes:
        request_id: as received.
        is_streamed: send tokens as they come; else each answer as a whole.
        num_answers: at least 1.
        stop_texts: texts that end an answer.
        constraint: what the answers must match; None: nothing.
        template: the submission of answer 0, without handle, grammar, deadline and credit.
    """

    request_id: str
    is_streamed: bool
    num_answers: int
    stop_texts: tuple[str, ...]
    constraint: OutputConstraint | None
    template: pb.Submission

    def submission(self, index: int) -> pb.Submission:
        """Returns a new submission of answer `index`, with its own seed. Only answer 0 returns prompt logprobs."""
        submission = pb.Submission()
        submission.CopyFrom(self.template)
        submission.sampling.seed = seed_of_answer(self.template.sampling.seed, index)
        if index:
            submission.ClearField("prompt_logprobs")
        return submission


def wanted_answers(request: Any, limits: RequestLimits, max_model_len: int) -> WantedAnswers:
    """Checks a GenerateRequest.

    What is not set has vLLM's defaults: temperature 1, as many tokens as fit, a random seed.

    Args:
        request: as received.
        limits: limits of the model.
        max_model_len: most tokens of prompt and answer.

    Raises:
        InvalidRequest: a field has an invalid value, or is not supported.
        RequestTooLong: the prompt leaves no room for a token.
    """
    _refuse_unsupported("", request, _REQUEST_FIELDS)
    params = request.sampling_params
    _refuse_unsupported(_PATH, params, _SAMPLING_FIELDS)
    if not request.request_id:
        raise InvalidRequest("request_id is empty: Abort would not find the request")
    check_length("request_id", len(request.request_id), MAX_REQUEST_ID_CHARS, "characters")
    num_tokens = len(request.tokenized.input_ids)
    if num_tokens >= max_model_len:  # before they are copied: 0.1 s for a million, in which no step is scheduled
        raise RequestTooLong(f"prompt has {num_tokens} tokens, max_model_len is {max_model_len} with the answer")
    prompt_ids = np.array(request.tokenized.input_ids, dtype="<u4")
    if not prompt_ids.size:
        raise InvalidRequest("tokenized.input_ids is empty: at least 1 token is needed")
    check_vocabulary("tokenized.input_ids", int(prompt_ids.max()), limits.vocab_size)
    num_answers = params.n or 1
    if num_answers > MAX_ANSWERS:
        raise InvalidRequest(f"{_PATH}n is {num_answers}, at most {MAX_ANSWERS} are allowed")
    check_parameter(f"{_PATH}stop", STOPPING["stop_texts"], params.stop, limits.vocab_size)
    return WantedAnswers(
        request_id=request.request_id,
        is_streamed=request.stream,
        num_answers=num_answers,
        stop_texts=tuple(params.stop),
        constraint=_constraint(params),
        template=pb.Submission(
            prompt_ids=prompt_ids.tobytes(),
            sampling=_sampling(params, limits.vocab_size),
            stops=_stops(params, limits.vocab_size, max_model_len - prompt_ids.size),
            top_logprobs=_num_logprobs("logprobs", params, limits.max_logprobs),
            prompt_logprobs=_num_logprobs("prompt_logprobs", params, limits.max_logprobs),
            request_id=request.request_id,
        ),
    )


def _refuse_unsupported(path: str, message: Any, supported: frozenset[str]) -> None:
    for field, _ in message.ListFields():
        if field.name not in supported:
            why = _WHY_NOT.get(field.name, "this engine does not know it")
            raise InvalidRequest(f"{path}{field.name} is set, which is not supported: {why}")


def _sampling(params: Any, vocab_size: int) -> pb.Sampling:
    values = {name: getattr(params, name) for name in _SAME_NAMES}
    if not params.HasField("temperature"):
        values["temperature"] = 1.0
    for name in _UNSET_IS_1:
        values[name] = values[name] or 1.0
    bias = tuple(sorted(params.logit_bias.items()))
    if bias and bias[0][0] < 0:
        raise InvalidRequest(f"{_PATH}logit_bias contains token id {bias[0][0]}: it must be at least 0")
    values["seed"] = params.seed if params.HasField("seed") else secrets.randbits(64)
    for name, value in (*values.items(), ("logit_bias", bias)):
        check_parameter(f"{_PATH}{name}", ENGINE_SAMPLING[name], value, vocab_size)
    return pb.Sampling(**values, bias_ids=[token_id for token_id, _ in bias], bias_values=[value for _, value in bias])


def _stops(params: Any, vocab_size: int, num_free_tokens: int) -> pb.TokenStops:
    max_tokens = params.max_tokens if params.HasField("max_tokens") else num_free_tokens
    if max_tokens < 1:
        raise InvalidRequest(f"{_PATH}max_tokens is 0: at least 1 is needed")
    if params.min_tokens > max_tokens:
        raise InvalidRequest(f"{_PATH}min_tokens is {params.min_tokens}, max_tokens only {max_tokens}")
    check_parameter(f"{_PATH}stop_token_ids", STOPPING["stop_token_ids"], params.stop_token_ids, vocab_size)
    return pb.TokenStops(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_end_token=params.ignore_eos,
    )


def _num_logprobs(name: str, params: Any, most: int) -> int | None:
    if not params.HasField(name):
        return None
    number: int = getattr(params, name)
    if not 0 <= number <= most:
        raise InvalidRequest(f"{_PATH}{name} is {number}, it must be from 0 to the engine's max_logprobs, {most}")
    return number


def _constraint(params: Any) -> OutputConstraint | None:
    name = params.WhichOneof("constraint")
    if name is None or (name == "json_object" and not params.json_object):
        return None
    field = f"{_PATH}{name}"
    match name:
        case "json_object":
            return OutputConstraint(ConstraintKind.JSON_OBJECT, "", field)
        case "choice":
            choices = list(params.choice.choices)
            if not choices:
                raise InvalidRequest(f"{field}.choices is empty: at least 1 is needed")
            text = json.dumps(choices)
        case _:
            text = getattr(params, name)
    check_length(field, len(text), MAX_GRAMMAR_CHARS, "characters")
    if name == "grammar" and "%json" in text:  # the library crashes for some schemas, which json_schema refuses
        raise InvalidRequest(f"{field} contains %json, which is not supported: send a json_schema instead")
    return OutputConstraint(ConstraintKind(name), text, field)
