"""Scheduler and model runner together give the tokens of `transformers`, for any division into steps."""

import random
import weakref
from dataclasses import replace

import pytest
import torch

from chairlift.service.end_reason import EndReason
from engine.core.outputs import ModelRunnerOutput, NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import RequestId, SamplingParams
from engine.errors import DeviceError, StepError
from engine.interfaces import execute
from engine.runner.kv_cache import KVCachePlan
from tests.support.engine.stream import LateStream

VARIANTS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
# How the same requests are served. With 5 blocks of 16 tokens and 8 requests of up to 61 tokens nearly everybody is
# preempted.
SCENARIOS = {
    "solo": {"max_num_seqs": 1},
    "batched": {},
    "chunked-7": {"max_num_batched_tokens": 7},
    "chunked-13": {"max_num_batched_tokens": 13},
    "preempted": {"num_blocks": 5},
    "preempted-uncached": {"num_blocks": 5, "enable_prefix_caching": False, "max_num_batched_tokens": 29},
    "uncached": {"enable_prefix_caching": False},
    "static": {"policy": "static", "max_num_seqs": 3},
    "wide-blocks": {"block_size": 48, "num_blocks": 24},
}
GREEDY = SamplingParams(seed=0, max_tokens=20, temperature=0.0, ignore_end_token=True)
SAMPLED = SamplingParams(seed=0, max_tokens=20, temperature=0.9, ignore_end_token=True, top_logprobs=3)


@pytest.fixture
def prompts(prompt):
    """Eight prompts of 1 to 41 tokens; three of them share 17 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(3, 200) for _ in range(17)]
    lengths = [1, 2, 4, 16, 41]
    ids = [[rng.randrange(3, 200) for _ in range(length)] for length in lengths]
    ids += [shared + [rng.randrange(3, 200) for _ in range(length)] for length in (1, 6, 15)]
    return [prompt(token_ids, GREEDY) for token_ids in ids]


@pytest.mark.sampled
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(tiny_engine, hf_reference, prompts, variant, scenario):
    architecture, overrides = VARIANTS[variant]
    run = tiny_engine(architecture, **overrides).serve(prompts, **SCENARIOS[scenario])
    reference = hf_reference(architecture, **overrides)
    checks = [
        reference.check_greedy(prompt.prompt_ids, answer.token_ids)
        for prompt, answer in zip(prompts, run.answers, strict=True)
    ]
    assert [check.num_tokens for check in checks] == [20] * len(prompts)
    assert sum(check.num_differences for check in checks) == 0
    assert (run.num_preemptions >= 4) == scenario.startswith("preempted")
    if "uncached" in scenario:
        assert run.num_cached_tokens == 0
    elif scenario in ("solo", "static", "preempted"):  # a prefix is there before the next of its kind is admitted
        assert run.num_cached_tokens >= 16


@pytest.mark.sampled(2)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_tokens_are_those_of_generate(tiny_engine, hf_reference, prompts, architecture):
    run = tiny_engine(architecture).serve(prompts)
    reference = hf_reference(architecture)
    want = [reference.generate(prompt.prompt_ids, 20) for prompt in prompts]
    assert [answer.token_ids for answer in run.answers] == want


def test_chunked_scenarios_cut_prompts_and_mix_them_with_decodes(tiny_engine, prompts):
    plans = tiny_engine("llama").serve(prompts, **SCENARIOS["chunked-7"]).plans
    assert all(plan.num_tokens <= 7 for plan in plans)
    widths = [[row.num_scheduled_tokens for row in plan.rows] for plan in plans]
    assert any(1 in row and max(row) > 1 for row in widths)
    assert any(not row.samples for plan in plans for row in plan.rows)


def _varied(prompts):
    """Each prompt with its own way of sampling."""
    changes = [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"logit_bias": ((7, 4.0), (9, -100.0)), "top_k": 20, "top_p": 0.95},
        {"temperature": 0.0, "repetition_penalty": 1.5, "top_logprobs": 0},
        {"ignore_end_token": False, "min_tokens": 15, "stop_token_ids": tuple(range(50, 110)), "top_logprobs": None},
    ]
    return [
        replace(prompt, params=replace(SAMPLED, seed=2**63 + index, **change))
        for index, (prompt, change) in enumerate(zip(prompts, changes, strict=True))
    ]


def _assert_same(answers, want):
    for answer, wanted in zip(answers, want, strict=True):
        assert answer.token_ids == wanted.token_ids
        assert answer.completion.reason is wanted.completion.reason
        assert [logprobs.top_ids for logprobs in answer.logprobs] == [logprobs.top_ids for logprobs in wanted.logprobs]
        got_values, wanted_values = (
            torch.tensor([value for logprobs in a.logprobs for value in (logprobs.chosen, *logprobs.top_values)])
            for a in (answer, wanted)
        )
        torch.testing.assert_close(got_values, wanted_values, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def solo_answers():
    """solo_answers(engine, prompts) -> the answers of the prompts served one at a time, computed once per engine."""
    answers = {}

    def get(engine, prompts):
        if engine not in answers:
            answers[engine] = [engine.serve([prompt]).answers[0] for prompt in prompts]
        return answers[engine]

    return get


@pytest.mark.sampled
@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "solo"])
def test_sampled_tokens_do_not_depend_on_the_batch(tiny_engine, prompts, solo_answers, scenario):
    """Logits of other batches differ in the last bits, and noise keyed by (seed, position, token) forgives that: a
    difference of 1e-6 changes about one token in a million.
    """
    engine, prompts = tiny_engine("llama"), _varied(prompts)
    run = engine.serve(prompts, **SCENARIOS[scenario])
    _assert_same(run.answers, solo_answers(engine, prompts))
    assert (run.num_preemptions >= 4) == scenario.startswith("preempted")


def test_sampled_answers_respect_their_limits(tiny_engine, prompts):
    answers = tiny_engine("llama").serve(_varied(prompts)).answers
    assert 9 not in answers[5].token_ids
    stop_ids = {*range(50, 110), 2}
    assert not stop_ids & set(answers[7].token_ids[:15])
    assert answers[7].completion.reason is EndReason.STOP_TOKEN
    assert answers[7].logprobs == []
    assert [len(logprobs.top_ids) for logprobs in answers[6].logprobs] == [0] * 20
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers)


def test_other_seeds_give_other_answers(tiny_engine, prompts):
    prompts = [replace(prompts[4], params=replace(SAMPLED, seed=seed)) for seed in (0, 1, 2**64 - 1, 0)]
    outputs = [tuple(answer.token_ids) for answer in tiny_engine("llama").serve(prompts).answers]
    assert outputs[0] == outputs[3]
    assert len(set(outputs)) == 3


@pytest.mark.parametrize("num_prior_tokens", [1, 7, 15, 19])
def test_a_continuation_goes_on_as_if_nothing_had_happened(tiny_engine, prompts, num_prior_tokens):
    engine, prompts = tiny_engine("llama"), [*prompts, *_varied(prompts)]
    undisturbed = engine.serve(prompts).answers
    continued = [
        replace(prompt, output_ids=tuple(answer.token_ids[:num_prior_tokens]))
        for prompt, answer in zip(prompts, undisturbed, strict=True)
    ]
    run = engine.serve(continued, max_num_batched_tokens=31)
    for answer in undisturbed:
        answer.logprobs = answer.logprobs[num_prior_tokens:]
    _assert_same(run.answers, undisturbed)


def test_raw_logprobs_are_those_of_transformers(tiny_engine, hf_reference, prompts):
    params = replace(SAMPLED, top_logprobs=5, temperature=0.3, top_k=4, repetition_penalty=1.4, logit_bias=((3, 2.0),))
    prompts = [replace(prompt, params=params) for prompt in prompts]
    for prompt, answer in zip(prompts, tiny_engine("llama").serve(prompts).answers, strict=True):
        ids = torch.tensor([[*prompt.prompt_ids, *answer.token_ids]])
        with torch.inference_mode():
            logits = hf_reference("llama").model(ids).logits[0, len(prompt.prompt_ids) - 1 : -1]
        want = logits.log_softmax(-1)
        best = want.topk(5)
        chosen = want.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor([row.chosen for row in answer.logprobs]), chosen, rtol=0, atol=2e-5)
        torch.testing.assert_close(
            torch.tensor([row.top_values for row in answer.logprobs]), best.values, rtol=0, atol=2e-5
        )
        assert [list(row.top_ids) for row in answer.logprobs] == best.indices.tolist()


def test_a_row_of_nan_fails_alone_and_leaves_nothing_behind(tiny_engine, prompts):
    """The embedding of token 205 is NaN, so one request fills its blocks with NaN; later requests reuse them."""
    engine = tiny_engine("llama", seed=5)
    want = engine.serve(prompts).answers
    engine.model.vocabulary.table[205] = float("nan")
    broken = replace(prompts[6], prompt_ids=(*prompts[6].prompt_ids[:18], 205, *prompts[6].prompt_ids[18:]))
    run = engine.serve([broken, *prompts], num_blocks=5, max_num_seqs=3)
    failed, *others = run.answers
    assert failed.completion.reason is EndReason.ENGINE_ERROR
    assert "NaN" in failed.completion.detail
    assert failed.token_ids == []
    _assert_same(others, want)


def test_a_request_without_any_candidate_fails_alone(tiny_engine, prompts):
    params = replace(GREEDY, min_tokens=3, stop_token_ids=tuple(range(211)))
    engine = tiny_engine("llama")
    run = engine.serve([prompts[0], replace(prompts[1], params=params)])
    assert run.answers[1].completion.reason is EndReason.ENGINE_ERROR
    assert "min_tokens" in run.answers[1].completion.detail
    _assert_same(run.answers[:1], engine.serve(prompts[:1]).answers)


def test_a_plan_without_rows_changes_nothing_but_what_is_known(tiny_engine):
    kv_plan = KVCachePlan(num_blocks=8, block_size=16, bytes_per_token=1, max_model_len=32)
    runner = tiny_engine("llama").runner(kv_plan, max_num_seqs=2, max_num_batched_tokens=8)
    assert execute(runner, SchedulerOutput(5, (), (), (), 0)) == ModelRunnerOutput(5, (), {}, {})


@pytest.mark.sampled
@pytest.mark.parametrize("late", [False, True], ids=["inline", "late"])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("scenario", ["batched", "chunked-7", "preempted"])
def test_steps_in_flight_change_no_token(tiny_engine, prompts, solo_answers, scenario, max_steps_in_flight, late):
    """Every way of sampling, on a device whose steps end late; also on one that has computed when `launch` returns."""
    engine, prompts = tiny_engine("llama"), _varied(prompts)
    run = engine.serve(
        prompts,
        max_steps_in_flight=max_steps_in_flight,
        stream=LateStream(max_steps_in_flight) if late else None,
        **SCENARIOS[scenario],
    )
    _assert_same(run.answers, solo_answers(engine, prompts))
    assert (run.num_preemptions >= 4) == (scenario == "preempted")


def test_a_row_of_nan_fails_alone_when_detected_a_step_late(tiny_engine, prompts):
    """The row takes part in one more step, whose result is dropped."""
    engine = tiny_engine("llama", seed=7)
    want = engine.serve(prompts).answers
    engine.model.vocabulary.table[205] = float("nan")
    broken = replace(prompts[6], prompt_ids=(*prompts[6].prompt_ids[:18], 205, *prompts[6].prompt_ids[18:]))
    run = engine.serve([broken, *prompts], num_blocks=5, max_num_seqs=3, max_steps_in_flight=2, stream=LateStream(0))
    failed, *others = run.answers
    assert failed.completion.reason is EndReason.ENGINE_ERROR
    assert failed.token_ids == []
    _assert_same(others, want)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("error", "error_class", "message"),
    [
        (RuntimeError("out of memory"), StepError, "out of memory"),
        (
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nFor debugging consider ..."),
            DeviceError,
            "CUDA error: an illegal memory access was encountered",
        ),
    ],
    ids=["step", "device"],
)
def test_a_failed_step_is_an_error_of_one_line(
    tiny_engine, prompts, monkeypatch, max_steps_in_flight, error, error_class, message
):
    """A step that runs late fails when it is collected."""
    engine = tiny_engine("llama")

    def step(_inputs):
        raise error

    monkeypatch.setattr(engine.ops, "compile_step", lambda *_, **__: step)
    stream = LateStream(0, eagerness=0.0) if max_steps_in_flight > 1 else None
    with pytest.raises(StepError) as caught:
        engine.serve(prompts[:3], max_steps_in_flight=max_steps_in_flight, stream=stream)
    assert type(caught.value) is error_class
    assert str(caught.value) == f"step 1 with 3 rows, 7 tokens: {message}"


def test_more_steps_in_flight_than_buffers_are_rejected(tiny_engine):
    kv_plan = KVCachePlan(num_blocks=8, block_size=16, bytes_per_token=1, max_model_len=32)
    runner = tiny_engine("llama").runner(kv_plan, max_num_seqs=2, max_num_batched_tokens=8, max_steps_in_flight=2)
    runner.launch(SchedulerOutput(1, (), (), (), 0))
    runner.launch(SchedulerOutput(2, (), (), (), 0))
    with pytest.raises(AssertionError, match="2 steps are in flight"):
        runner.launch(SchedulerOutput(3, (), (), (), 0))
    assert runner.collect().step == 1
    runner.launch(SchedulerOutput(3, (), (), (), 0))
    assert [runner.collect().step for _ in range(2)] == [2, 3]


def test_a_closed_runner_holds_no_recorded_step(tiny_engine, monkeypatch):
    class Recorded:
        """Fake of a step with CUDA graphs."""

    engine, recorded = tiny_engine("llama"), [Recorded()]
    destroyed = weakref.finalize(recorded[0], int)
    monkeypatch.setattr(engine.ops, "compile_step", lambda *_, **__: recorded.pop())
    runner = engine.runner(KVCachePlan(8, 16, 1, 32), max_num_seqs=2, max_num_batched_tokens=8)
    assert destroyed.alive
    runner.close()
    assert not destroyed.alive


def test_results_are_aligned_with_the_rows_of_the_plan(tiny_engine):
    engine = tiny_engine("llama", seed=6)
    engine.model.vocabulary.table[205] = float("nan")
    kv_plan = KVCachePlan(num_blocks=8, block_size=16, bytes_per_token=1, max_model_len=16)
    runner = engine.runner(kv_plan, max_num_seqs=3, max_num_batched_tokens=8)
    new = [
        NewRequest(RequestId(request_id), token_ids, 1, SAMPLED, (request_id,))
        for request_id, token_ids in [(1, (3, 4, 5)), (2, (6, 7)), (3, (8, 205))]
    ]
    rows = [ScheduledRow(RequestId(i), 2, 0, (), samples) for i, samples in [(1, False), (2, True), (3, True)]]
    result = execute(runner, SchedulerOutput(1, (), tuple(new), tuple(rows), 6))
    assert [token_id >= 0 for token_id in result.token_ids] == [False, True, False]
    assert result.logprobs.keys() == {1}
    assert result.failures.keys() == {2}
