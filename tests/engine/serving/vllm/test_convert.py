"""Requests of vLLM's API: what is checked, what is refused by name, and what becomes of the rest."""

from typing import Any

import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from chairlift.service.structured.output_constraint import ConstraintKind
from engine.core.request import RequestId
from engine.errors import RequestError
from engine.serving.convert import RequestLimits, request_from_submission
from engine.serving.vllm.convert import MAX_ANSWERS, wanted_answers
from tests.support.engine.gateway import wanted

LIMITS = RequestLimits(vocab_size=100, max_logprobs=5, end_token_ids=frozenset({1}))
MAX_MODEL_LEN = 64


def refusal(request: Any) -> str:
    with pytest.raises(RequestError) as caught:
        wanted_answers(request, LIMITS, MAX_MODEL_LEN)
    return str(caught.value)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature is -1, it must be at least 0 and at most 100"),
        ({"temperature": float("nan")}, "sampling_params.temperature is nan, it must be at least 0 and at most 100"),
        ({"top_p": 1.5}, "sampling_params.top_p is 1.5, it must be above 0 and at most 1"),
        ({"min_p": 2.0}, "sampling_params.min_p is 2, it must be at least 0 and at most 1"),
        ({"frequency_penalty": 3.0}, "sampling_params.frequency_penalty is 3, it must be at least -2 and at most 2"),
        ({"presence_penalty": -3.0}, "sampling_params.presence_penalty is -3, it must be at least -2 and at most 2"),
        ({"repetition_penalty": 11.0}, "repetition_penalty is 11, it must be at least 0.1 and at most 10"),
        ({"seed": -1}, "sampling_params.seed is -1, it must be at least 0"),
        ({"max_tokens": 0}, "sampling_params.max_tokens is 0: at least 1 is needed"),
        ({"min_tokens": 9}, "sampling_params.min_tokens is 9, max_tokens only 8"),
        ({"n": MAX_ANSWERS + 1}, "sampling_params.n is 129, at most 128 are allowed"),
        ({"logprobs": -1}, "sampling_params.logprobs is -1, it must be from 0 to the engine's max_logprobs, 5"),
        ({"prompt_logprobs": 6}, "sampling_params.prompt_logprobs is 6, it must be from 0 to"),
        ({"stop": [""]}, "sampling_params.stop has an empty entry"),
        ({"stop": ["x"] * 17}, "sampling_params.stop has 17 entries, at most 16 are allowed"),
        ({"stop_token_ids": [100]}, "sampling_params.stop_token_ids contains token id 100, the vocabulary has 100"),
        ({"logit_bias": {-2: 1.0}}, "sampling_params.logit_bias contains token id -2: it must be at least 0"),
        ({"logit_bias": {100: 1.0}}, "sampling_params.logit_bias contains token id 100, the vocabulary has 100"),
        ({"logit_bias": {3: 101.0}}, "sampling_params.logit_bias has a value of 101, it must be at least -100"),
    ],
)
def test_values_out_of_range_are_named_with_the_numbers(params: dict[str, Any], message: str) -> None:
    assert message in refusal(wanted(**params))


def test_prompts_are_checked() -> None:
    assert refusal(wanted([])) == "tokenized.input_ids is empty: at least 1 token is needed"
    assert refusal(wanted([5, 100])) == "tokenized.input_ids contains token id 100, the vocabulary has 100 tokens"
    assert refusal(wanted([5] * 63 + [100])) == "prompt has 64 tokens, max_model_len is 64 with the answer"
    assert refusal(wanted(request_id="")).startswith("request_id is empty")
    assert "request_id has 257 characters, at most 256" in refusal(wanted(request_id="x" * 257))


UNSUPPORTED = {
    "text": {"text": "Once"},
    "mm_inputs": {"mm_inputs": vllm_pb.MultimodalInputs(im_token_id=1)},
    "extra_mm_inputs": {"extra_mm_inputs": [vllm_pb.MultimodalInputs(im_token_id=1)]},
    "media_refs": {"media_refs": vllm_pb.MediaRefs()},
    "data_parallel_rank": {"data_parallel_rank": 0},
    "kv_transfer_params": {"kv_transfer_params": vllm_pb.KvTransferParams(remote_host="x")},
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
}
UNSUPPORTED_PARAMS = {
    "truncate_prompt_tokens": {"truncate_prompt_tokens": -1},
    "structural_tag": {"structural_tag": "{}"},
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    request = wanted()
    request.MergeFrom(vllm_pb.GenerateRequest(**UNSUPPORTED[name]))
    assert refusal(request).startswith(f"{name} is set, which is not supported: ")


@pytest.mark.parametrize("name", UNSUPPORTED_PARAMS)
def test_unsupported_parameters_are_refused_by_name(name: str) -> None:
    message = refusal(wanted(**UNSUPPORTED_PARAMS[name]))
    assert message.startswith(f"sampling_params.{name} is set, which is not supported: ")


def test_every_field_is_served_ignored_on_purpose_or_refused() -> None:
    """A field that a later version of the package adds is refused, too."""
    served = {"request_id", "tokenized", "sampling_params", "stream"}
    assert set(vllm_pb.GenerateRequest.DESCRIPTOR.fields_by_name.keys()) == served | UNSUPPORTED.keys()


def test_a_request_becomes_a_submission_that_the_engine_accepts() -> None:
    request = wanted(
        [5, 6],
        n=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=2.0,
        seed=9,
        min_tokens=3,
        stop=["end"],
        stop_token_ids=[4],
        ignore_eos=True,
        logprobs=1,
        prompt_logprobs=0,
        logit_bias={8: 1.5, 3: -2.0},
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        include_stop_str_in_output=True,
        grammar_from_first_token=True,
    )
    answers = wanted_answers(request, LIMITS, MAX_MODEL_LEN)
    assert (answers.num_answers, answers.stop_texts, answers.constraint) == (2, ("end",), None)
    submission = answers.submission(0)
    submission.handle = 1
    params = request_from_submission(submission, RequestId(1), LIMITS, 0.0).params
    expected = {"temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 2.0, "seed": 9}
    expected |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "logit_bias": ((3, -2.0), (8, 1.5))}
    expected |= {"max_tokens": 8, "min_tokens": 3, "stop_token_ids": (4,), "ignore_end_token": True}
    expected |= {"top_logprobs": 1, "prompt_logprobs": 0}
    assert {name: getattr(params, name) for name in expected} == expected
    assert np.frombuffer(submission.prompt_ids, "<u4").tolist() == [5, 6]
    other = answers.submission(1)
    assert other.sampling.seed != 9
    assert not other.HasField("prompt_logprobs")


@pytest.mark.parametrize(
    ("params", "kind", "text"),
    [
        ({"json_schema": "{}"}, ConstraintKind.JSON_SCHEMA, "{}"),
        ({"regex": "a+"}, ConstraintKind.REGEX, "a+"),
        ({"grammar": "start: x"}, ConstraintKind.GRAMMAR, "start: x"),
        ({"json_object": True}, ConstraintKind.JSON_OBJECT, ""),
        ({"choice": vllm_pb.ChoiceConstraint(choices=["a", "b"])}, ConstraintKind.CHOICE, '["a", "b"]'),
    ],
)
def test_constraints(params: dict[str, Any], kind: ConstraintKind, text: str) -> None:
    constraint = wanted_answers(wanted(**params), LIMITS, MAX_MODEL_LEN).constraint
    assert constraint is not None
    (name,) = params
    assert (constraint.kind, constraint.text, constraint.field) == (kind, text, f"sampling_params.{name}")


def test_json_object_false_constrains_nothing() -> None:
    assert wanted_answers(wanted(json_object=False), LIMITS, MAX_MODEL_LEN).constraint is None
