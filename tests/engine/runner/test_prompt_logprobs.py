"""Log-probabilities of prompts equal those of `transformers`, for any division into steps."""

import random
from dataclasses import replace

import pytest
import torch

from chairlift.service.end_reason import EndReason
from engine.core.request import SamplingParams
from tests.support.engine.stream import LateStream

PARAMS = SamplingParams(
    seed=0, max_tokens=12, temperature=0.8, ignore_end_token=True, top_logprobs=1, prompt_logprobs=3
)
# With 5 blocks of 16 tokens and 7 requests of up to 53 tokens some are preempted.
SCENARIOS = {
    "solo": {"max_num_seqs": 1},
    "batched": {},
    "wide": {"max_num_seqs": 64, "max_num_batched_tokens": 512},
    "chunked-7": {"max_num_batched_tokens": 7},
    "few slots": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 5},
    "preempted-uncached": {"num_blocks": 5, "enable_prefix_caching": False, "max_num_batched_tokens": 29},
    "static": {"policy": "static", "max_num_seqs": 3},
}


@pytest.fixture
def prompts(prompt):
    """Seven prompts of 1 to 41 tokens, two of them equal; all but one request prompt log-probabilities.

    Those have penalties, biases and filters, which must not affect the log-probabilities.
    """
    rng = random.Random(5)
    lengths = [23, 9, 1, 2, 41, 17]
    ids = [[rng.randrange(3, 200) for _ in range(length)] for length in lengths]
    ids.append(ids[4])
    wanting = replace(
        PARAMS, repetition_penalty=1.4, presence_penalty=0.3, logit_bias=((9, -100.0), (3, 2.0)), top_k=5, min_tokens=4
    )
    plain = replace(PARAMS, prompt_logprobs=None)
    return [
        prompt(token_ids, replace(plain if index == 1 else wanting, seed=index)) for index, token_ids in enumerate(ids)
    ]


def _assert_true(answers, prompts, reference):
    for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if prompt.params.prompt_logprobs is None or len(prompt.prompt_ids) == 1:
            assert answer.prompt_logprobs == [], f"request {index}"
            continue
        with torch.inference_mode():
            logits = reference.model(torch.tensor([prompt.prompt_ids])).logits[0, :-1]
        want = logits.log_softmax(-1)
        best = want.topk(prompt.params.prompt_logprobs)
        chosen = want.gather(1, torch.tensor(prompt.prompt_ids[1:])[:, None])[:, 0]
        close = {"rtol": 0, "atol": 1e-4}
        torch.testing.assert_close(torch.tensor([row.chosen for row in answer.prompt_logprobs]), chosen, **close)
        values = torch.tensor([row.top_values for row in answer.prompt_logprobs])
        torch.testing.assert_close(values, best.values, **close)
        assert [list(row.top_ids) for row in answer.prompt_logprobs] == best.indices.tolist()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_prompt_logprobs_are_those_of_transformers(tiny_engine, hf_reference, prompts, scenario, max_steps_in_flight):
    """Tokens equal those of the same requests without prompt log-probabilities."""
    config = SCENARIOS[scenario]
    run = tiny_engine("llama").serve(
        prompts,
        max_steps_in_flight=max_steps_in_flight,
        stream=LateStream(max_steps_in_flight) if max_steps_in_flight > 1 else None,
        **config,
    )
    _assert_true(run.answers, prompts, hf_reference("llama"))
    assert (run.num_preemptions > 0) == scenario.startswith("preempted")
    wanting_none = [replace(prompt, params=replace(prompt.params, prompt_logprobs=None)) for prompt in prompts]
    plain = tiny_engine("llama").serve(wanting_none)
    assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in plain.answers]
    max_num_logits = max(sum(row.samples + row.num_prompt_logits for row in plan.rows) for plan in run.plans)
    assert max_num_logits <= config.get("max_num_seqs", 16)
    if scenario == "few slots":  # a prompt is scored one token at a time, beside one that decodes
        assert any(row.num_prompt_logits == 1 == row.num_scheduled_tokens for plan in run.plans for row in plan.rows)


def test_only_alternatives_that_were_asked_for_are_reported(tiny_engine, prompts):
    params = [replace(PARAMS, prompt_logprobs=count, top_logprobs=top) for count, top in [(0, 5), (4, 0), (2, None)]]
    run = tiny_engine("llama").serve([replace(prompts[0], params=one) for one in params])
    for answer, one in zip(run.answers, params, strict=True):
        assert {len(row.top_ids) for row in answer.prompt_logprobs} == {one.prompt_logprobs}
        assert [len(row.top_ids) for row in answer.logprobs] == [one.top_logprobs] * (12 if answer.logprobs else 0)


def test_a_cached_prompt_is_recomputed_for_its_logprobs(tiny_engine, hf_reference, prompts):
    """The second of two equal requests uses no block of the first; one without log-probabilities uses all of them."""
    want_none = replace(prompts[4], params=replace(PARAMS, prompt_logprobs=None))
    trio = [prompts[4], prompts[4], want_none]
    run = tiny_engine("llama").serve(trio, max_num_seqs=1)
    _assert_true(run.answers, trio, hf_reference("llama"))
    assert [answer.num_cached_tokens for answer in run.answers] == [0, 0, 32]


def test_a_continuation_reports_its_prompt_if_it_asks(tiny_engine, hf_reference, prompts):
    answers = tiny_engine("llama").serve(prompts).answers
    continued = [
        replace(prompt, output_ids=tuple(answer.token_ids[:5])) for prompt, answer in zip(prompts, answers, strict=True)
    ]
    run = tiny_engine("llama").serve(continued, max_num_batched_tokens=11)
    _assert_true(run.answers, prompts, hf_reference("llama"))
    assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in answers]


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_prompt_of_nan_fails_alone(tiny_engine, hf_reference, prompts, max_steps_in_flight):
    """Log-probabilities of the chunks before the NaN are reported."""
    engine = tiny_engine("llama", seed=8)
    engine.model.vocabulary.table[205] = float("nan")
    broken = replace(prompts[0], prompt_ids=(*prompts[0].prompt_ids[:19], 205, *prompts[0].prompt_ids[19:]))
    run = engine.serve(
        [broken, *prompts],
        max_num_seqs=4,
        max_steps_in_flight=max_steps_in_flight,
        stream=LateStream(3) if max_steps_in_flight > 1 else None,
    )
    failed, *others = run.answers
    assert failed.completion.reason is EndReason.ENGINE_ERROR
    assert "NaN" in failed.completion.detail
    assert failed.token_ids == []
    assert 0 < len(failed.prompt_logprobs) < 20
    _assert_true(others, prompts, hf_reference("llama", seed=8))
