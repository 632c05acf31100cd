"""Scheduler, runner and GPU operations together give the tokens of the reference operations and of `transformers`.

Without a GPU, Triton's interpreter runs the kernels, and fake CUDA graphs replay the steps.
"""

import itertools
import random
from dataclasses import replace
from unittest import mock

import pytest
import torch

from engine.constraints.constraint import Constraint
from engine.core.request import SamplingParams
from engine.runner.buckets import padded_size
from engine.runner.stream import CudaStream
from kernels.families import reference_ops
from tests.support.engine.stream import LateStream
from tests.support.kernels.graphs import FakeGraphs

BUCKETS, MIXED_BUCKETS = (1, 2, 4), (6, 12)
GREEDY = SamplingParams(seed=0, max_tokens=1, temperature=0.0, ignore_end_token=True)
EVERYTHING = replace(
    GREEDY,
    seed=7,
    temperature=0.9,
    top_k=20,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.3,
    logit_bias=((7, 2.0),),
    top_logprobs=2,
)


@pytest.fixture
def prompts(prompt):
    """Four requests that end one after the other, so that there are decode steps of 4, 3, 2 rows and of 1."""
    rng = random.Random(3)
    lens = ((1, 9), (3, 8), (17, 6), (20, 3))
    return [
        prompt([rng.randrange(3, 200) for _ in range(num_prompt)], replace(GREEDY, max_tokens=num_output))
        for num_prompt, num_output in lens
    ]


@pytest.fixture
def graphs(monkeypatch):
    """Fake CUDA graphs; None on a GPU, which has real ones."""
    if torch.cuda.is_available():
        return None
    graphs = FakeGraphs()
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", graphs.end_allocation)
    return graphs


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["vendor's products", "invariant"])
def recording_ops(request, gpu_ops, graphs):
    """GPU operations, also with --batch-invariant, that record their steps in `graphs`.

    Every replay is compared with the same step run eagerly.
    """
    ops = gpu_ops(batch_invariant=request.param)
    if graphs is None:
        return ops
    compile_step = ops.compile_step

    def compile_checked(step, largest, *sizes, **options):
        recorded = compile_step(graphs.recordable(step), largest, *sizes, **options)

        def call(inputs):
            num_replays = len(graphs.replayed)
            logits = recorded(inputs).clone()
            if len(graphs.replayed) > num_replays:
                wanted = largest.logits_indices[: len(inputs.input_ids)]  # products depend on the number of rows
                with mock.patch.object(torch, "empty", torch.zeros):  # attention does not write tokens of padding
                    eager = step(replace(inputs, metadata=replace(inputs.metadata), logits_indices=wanted))
                assert torch.equal(logits, eager[: len(logits)])
            return logits

        return call

    ops.compile_step = compile_checked
    return ops


def test_replayed_steps_give_the_greedy_tokens_of_transformers(
    make_checkpoint, engine_on, reference_of, recording_ops, graphs, gpu_device, prompts
):
    """Prompt chunks beside decodes and a prompt with log-probabilities, padded; decodes of 3 rows padded to 4."""
    path = make_checkpoint("qwen3", num_hidden_layers=1)
    stream = CudaStream(gpu_device) if graphs is None else None
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    prompts.append(
        replace(prompts[1], params=replace(GREEDY, prompt_logprobs=1))
    )  # runs in the first slot that becomes free
    run = engine_on(path, recording_ops, gpu_device).serve(
        prompts, stream=stream, decode_buckets=BUCKETS, mixed_buckets=MIXED_BUCKETS, **options
    )
    decodes = [len(plan.rows) for plan in run.plans if plan.num_tokens == len(plan.rows)]
    assert 3 in decodes
    scored = [row.num_scheduled_tokens for plan in run.plans for row in plan.rows if row.num_prompt_logits]
    assert scored == [1, 1]
    if graphs is not None:
        assert [num_tokens for num_tokens, _ in graphs.recorded] == [12, 6, 4, 2, 1]
        sizes = [(plan.num_tokens, len(plan.rows)) for plan in run.plans if plan.rows]
        mixed = {num_tokens for num_tokens, num_rows in sizes if num_tokens > num_rows}
        assert max(mixed) > 12
        assert mixed - {6, 12} - {max(mixed)}, mixed
        assert graphs.replayed == [
            padded_size(num_tokens, BUCKETS if num_tokens == num_rows else MIXED_BUCKETS)
            for num_tokens, num_rows in sizes
            if num_tokens <= 12
        ]
    want = engine_on(path, reference_ops()).serve(prompts, **options)
    assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in want.answers]
    _assert_close(run.answers[4].prompt_logprobs, want.answers[4].prompt_logprobs, 2)
    reference = reference_of(path)
    for one, answer in zip(prompts, run.answers, strict=True):
        assert reference.check_greedy(one.prompt_ids, answer.token_ids).num_differences == 0


@pytest.mark.parametrize("failing", [(12, 4), pytest.param((12, 6, 4, 2, 1), marks=pytest.mark.slow)])
def test_sizes_that_could_not_be_recorded_give_the_same_tokens(
    make_checkpoint, engine_on, gpu_ops, gpu_device, graphs, prompts, failing
):
    """They run eagerly with padding, of which attention writes nothing: new memory holds NaN."""
    if graphs is None:
        pytest.skip("captures fail on fake graphs only")
    path = make_checkpoint("qwen3", num_hidden_layers=1)
    del prompts[2]  # then a step of 10 tokens is padded to 12, and decodes of 3 rows to 4
    ops, empty = gpu_ops(), torch.empty
    compile_step = ops.compile_step
    ops.compile_step = lambda step, *args, **options: compile_step(graphs.recordable(step), *args, **options)
    graphs.failing = dict.fromkeys(failing, RuntimeError("operation not permitted when stream is capturing"))

    def poisoned(*size, **options):
        tensor = empty(*size, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    with mock.patch.object(torch, "empty", poisoned):
        run = engine_on(path, ops, gpu_device).serve(
            prompts, max_num_seqs=4, max_num_batched_tokens=16, decode_buckets=BUCKETS, mixed_buckets=MIXED_BUCKETS
        )
    assert [size for size, _, _ in ops.unrecorded] == list(failing)
    assert not set(graphs.replayed) & set(failing)
    assert {(10, 3), (3, 3)} <= {(plan.num_tokens, len(plan.rows)) for plan in run.plans}
    want = engine_on(path, reference_ops()).serve(prompts, max_num_seqs=4, max_num_batched_tokens=16)
    assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in want.answers]


def test_two_steps_in_flight_give_the_sampled_tokens_of_the_reference(
    make_checkpoint, engine_on, gpu_ops, gpu_device, prompts
):
    """All sampling options, with tokens and histories that only the device knows when a step is built."""
    path = make_checkpoint("llama", num_hidden_layers=1)
    params = replace(EVERYTHING, prompt_logprobs=3)
    sampled = [replace(one, params=replace(params, max_tokens=6 - index)) for index, one in enumerate(prompts[1:3])]
    sampled.append(prompts[0])  # greedy beside them
    stream = LateStream(seed=1) if gpu_device.type == "cpu" else CudaStream(gpu_device)
    run = engine_on(path, gpu_ops(), gpu_device).serve(sampled, stream=stream, max_steps_in_flight=2)
    want = engine_on(path, reference_ops()).serve(sampled)
    for answer, wanted in zip(run.answers, want.answers, strict=True):
        assert answer.token_ids == wanted.token_ids
        _assert_close(answer.logprobs, wanted.logprobs, len(wanted.logprobs))
        _assert_close(answer.prompt_logprobs, wanted.prompt_logprobs, len(wanted.prompt_logprobs))
    assert [len(answer.prompt_logprobs) for answer in run.answers] == [2, 16, 0]


def test_two_steps_in_flight_give_the_constrained_tokens_of_the_reference(
    make_checkpoint, engine_on, gpu_ops, gpu_device, prompts
):
    """One batch with a constant mask, a mask that every token changes, and no mask."""
    path = make_checkpoint("llama", num_hidden_layers=1)
    pairs = [(before, after) for before in range(211) for after in range(before % 2, 211, 2)]
    constraints = [
        lambda: Constraint(211, allowed_ids=range(100, 130)),
        lambda: Constraint(211, bad_sequences=pairs),
        None,
    ]
    constrained = [
        replace(one, params=replace(EVERYTHING, max_tokens=5), constraint=constraint)
        for one, constraint in zip(prompts, constraints, strict=False)
    ]
    stream = LateStream(seed=1) if gpu_device.type == "cpu" else CudaStream(gpu_device)
    run = engine_on(path, gpu_ops(), gpu_device).serve(constrained, stream=stream, max_steps_in_flight=2)
    want = engine_on(path, reference_ops()).serve(constrained)
    assert [answer.token_ids for answer in run.answers] == [answer.token_ids for answer in want.answers]
    allowed, paired, _ = run.answers
    assert set(allowed.token_ids) <= set(range(100, 130))
    assert all((before + after) % 2 for before, after in itertools.pairwise(paired.token_ids))


def _assert_close(ours, theirs, num_tokens):
    assert len(ours) == num_tokens
    for a, b in zip(ours, theirs, strict=True):
        assert a.top_ids == b.top_ids
        assert a.chosen == pytest.approx(b.chosen, abs=2e-5)
        assert a.top_values == pytest.approx(b.top_values, abs=2e-5)
