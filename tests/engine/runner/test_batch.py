"""Ragged batches against a plain loop over tokens."""

import itertools
import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import SamplingParams
from engine.runner.batch import BatchBuilder
from engine.runner.request_state import RequestState
from engine.runner.sampling_state import SamplingState
from tests.support.engine.stream import LateStream

MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN = 6, 40, 50
PARAMS = SamplingParams(seed=0, max_tokens=1)
HISTORY = torch.zeros(1, 1, dtype=torch.int32)


def _plan(rng, block_size, num_rows, decodes_only, num_groups=1):
    """A plan whose requests are all new, some of them with computed tokens already."""
    new, rows = [], []
    for request_id in rng.sample(range(100), num_rows):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, MAX_LEN - 1))]
        blocks = [rng.randrange(1000) for _ in range(-(-len(tokens) // block_size) * num_groups)]
        new.append(NewRequest(request_id, tuple(tokens), 1, PARAMS, tuple(blocks)))
        computed = len(tokens) - 1 if decodes_only else rng.randrange(len(tokens))
        scheduled = min(rng.randint(1, len(tokens) - computed), MAX_TOKENS // MAX_NUM_SEQS)
        rows.append(ScheduledRow(request_id, scheduled, computed, (), computed + scheduled == len(tokens)))
    rows.sort(key=lambda row: row.num_scheduled_tokens)
    num_tokens = sum(row.num_scheduled_tokens for row in rows)
    return SchedulerOutput(1, (), tuple(new), tuple(rows), num_tokens)


@pytest.fixture(params=[1, 4, 16])
def block_size(request):
    return request.param


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("decodes_only", [False, True])
def test_batches_are_those_of_a_loop_over_tokens(block_size, decodes_only, num_groups):
    rng = random.Random(block_size)
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        num_groups=num_groups,
    )
    for num_rows in [1, 2, MAX_NUM_SEQS] * 20:
        plan = _plan(rng, block_size, num_rows, decodes_only, num_groups)
        state = _state(plan, block_size, num_groups)
        batch = builder.build(plan, state)
        inputs, metadata = batch.inputs, batch.inputs.metadata

        requests = {request.request_id: request for request in plan.new_requests}
        input_ids, positions, lasts = [], [], []
        slots = [[] for _ in range(num_groups)]
        for index, row in enumerate(plan.rows):
            request = requests[row.request_id]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens):
                input_ids.append(request.token_ids[position])
                positions.append(position)
                for group in range(num_groups):
                    block_id = request.block_ids[position // block_size * num_groups + group]
                    slots[group].append(block_id * block_size + position % block_size)
            lasts.append(len(input_ids))
            num_used = -(-(positions[-1] + 1) // block_size)
            for group in range(num_groups):
                block_table = metadata.of_group(group).block_table
                assert block_table[index, :num_used].tolist() == list(request.block_ids[group::num_groups][:num_used])
        assert inputs.input_ids.tolist() == input_ids
        assert inputs.positions.tolist() == positions
        assert [metadata.of_group(group).slot_mapping.tolist() for group in range(num_groups)] == slots
        assert metadata.query_start_loc.tolist() == [0, *lasts]
        assert metadata.seq_lens.tolist() == [positions[last - 1] + 1 for last in lasts]
        assert metadata.max_query_len == max(row.num_scheduled_tokens for row in plan.rows)
        assert metadata.max_seq_len == max(positions) + 1
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.samples]
        assert batch.sampling_rows.tolist() == sampling_rows
        assert inputs.logits_indices.tolist() == [lasts[index] - 1 for index in sampling_rows]
        assert batch.columns.rows.tolist() == state.rows_of(plan.rows[i].request_id for i in sampling_rows).tolist()


def test_tensors_have_the_dtypes_and_layout_kernels_expect(block_size):
    plan = _plan(random.Random(0), block_size, 5, decodes_only=False)
    state = _state(plan, block_size)
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, block_size=block_size
    )
    inputs = builder.build(plan, state).inputs
    metadata = inputs.metadata
    for tensor in (inputs.input_ids, inputs.positions, metadata.slot_mapping, inputs.logits_indices):
        assert tensor.dtype == torch.int64
    for tensor in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    assert metadata.num_tokens == plan.num_tokens == len(inputs.input_ids)
    assert metadata.block_table.shape == (5, -(-MAX_LEN // block_size))
    assert metadata.block_size == block_size


def _tensors(inputs):
    metadata = inputs.metadata
    yield from (inputs.input_ids, inputs.positions, inputs.logits_indices)
    yield from (metadata.query_start_loc, metadata.seq_lens, metadata.block_table, metadata.slot_mapping)
    for blocks in metadata.other_groups:
        yield from blocks


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("decodes_only", [False, True])
def test_a_late_device_gets_the_same_batch_by_one_copy_of_what_is_used(block_size, decodes_only, num_groups):
    """Whatever lay in its buffers, and whatever the host packs in the meantime."""
    limits = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_model_len": MAX_LEN,
        "block_size": block_size,
        "num_groups": num_groups,
    }
    stream = LateStream(0, eagerness=0.0)
    inline, late = BatchBuilder(**limits), BatchBuilder(**limits, stream=stream, max_steps_in_flight=2)
    rng = random.Random(block_size)
    for num_rows in [1, 2, MAX_NUM_SEQS] * 5:
        plans = [_plan(rng, block_size, num_rows, decodes_only, num_groups) for _ in range(2)]
        states = [_state(plan, block_size, num_groups) for plan in plans]
        batches = [late.build(plan, state) for plan, state in zip(plans, states, strict=True)]
        for plan, state, batch in zip(plans, states, batches, strict=True):
            wanted = inline.build(plan, state)
            for tensor in _tensors(late.largest()):
                tensor.fill_(-77)
            batch.upload()
            width = -(-wanted.inputs.metadata.max_seq_len // block_size)
            for got, want in zip(_tensors(batch.inputs), _tensors(wanted.inputs), strict=True):
                columns = (slice(None), slice(width)) if want.ndim == 2 else ()
                assert torch.equal(got[columns], want[columns])
            _assert_equal_sampling(batch, wanted)


def _assert_equal_sampling(batch, wanted):
    got, want = batch.sampling(HISTORY), wanted.sampling(HISTORY)
    for field in fields(got):
        a, b = getattr(got, field.name), getattr(want, field.name)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name
    assert torch.equal(batch.device_state_rows, wanted.device_state_rows)


def test_batches_do_not_depend_on_earlier_ones():
    """A builder that has built every other batch before says the same as one that has built nothing."""
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 2, "max_model_len": 4, "block_size": 4}
    changes = [
        {"temperature": 0.0},
        {"top_k": 3},
        {"presence_penalty": 1.0},
        {"top_logprobs": 2},
        {"logit_bias": ((5, 1.0),)},
        {"seed": 7},
    ]
    sampling = SamplingState(max_num_seqs=2, vocab_size=1000, end_token_ids=())
    state = RequestState(max_num_seqs=2, max_model_len=4, block_size=4, sampling=sampling)
    state.apply(SchedulerOutput(1, (), tuple(NewRequest(i, (1,), 1, PARAMS, (i,)) for i in (0, 1)), (), 0))
    builder = BatchBuilder(**limits)
    for num_rows, change, is_changed in itertools.product((1, 2), changes, (True, False)):
        for row in (0, 1):
            sampling.set_rows([row], [replace(PARAMS, **change) if is_changed else PARAMS])
        plan = SchedulerOutput(2, (), (), tuple(ScheduledRow(i, 1, 0, (), True) for i in range(num_rows)), num_rows)
        batch = builder.build(plan, state)
        _assert_equal_sampling(batch, BatchBuilder(**limits).build(plan, state))
        other_history = torch.ones_like(HISTORY)
        assert batch.sampling(other_history).history is other_history


def test_decode_steps_are_padded_to_the_next_size(block_size):
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        decode_buckets=(1, 4),
    )
    rng = random.Random(block_size)
    for num_rows, size in [(1, 1), (2, 4), (3, 4), (4, 4), (5, 5), (MAX_NUM_SEQS, MAX_NUM_SEQS)] * 3:
        plan = _plan(rng, block_size, num_rows, decodes_only=True)
        for tensor in _tensors(builder.largest()):
            tensor.fill_(99)
        inputs = builder.build(plan, _state(plan, block_size)).inputs
        metadata = inputs.metadata
        assert (metadata.num_reqs, metadata.num_tokens, metadata.num_one_token_reqs) == (size, size, size)
        assert (metadata.max_query_len, len(inputs.logits_indices)) == (1, num_rows)
        assert metadata.query_start_loc.tolist() == list(range(size + 1))
        padding = slice(num_rows, size)
        assert not inputs.input_ids[padding].any()
        assert not inputs.positions[padding].any()
        assert not metadata.seq_lens[padding].any()
        assert metadata.slot_mapping[padding].eq(-1).all()
        assert all(index < size for index in builder.largest().logits_indices[:size].tolist())


def test_steps_with_prompts_are_not_padded(block_size):
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        decode_buckets=(4, 6),
    )
    plan = _plan(random.Random(2), block_size, 3, decodes_only=False)
    assert plan.num_tokens > 3
    metadata = builder.build(plan, _state(plan, block_size)).inputs.metadata
    assert (metadata.num_reqs, metadata.num_tokens) == (3, plan.num_tokens)
    assert metadata.num_one_token_reqs == sum(row.num_scheduled_tokens == 1 for row in plan.rows)


def test_buffers_hold_padding_before_the_first_batch(block_size):
    """Graphs are recorded with it."""
    limits = {
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_TOKENS,
        "max_model_len": MAX_LEN,
        "block_size": block_size,
    }
    for builder in (BatchBuilder(**limits), BatchBuilder(**limits, stream=LateStream(0), max_steps_in_flight=2)):
        inputs = builder.largest()
        assert inputs.metadata.query_start_loc.tolist() == list(range(MAX_NUM_SEQS + 1))
        assert inputs.metadata.slot_mapping.eq(-1).all()
        for tensor in (inputs.input_ids, inputs.positions, inputs.logits_indices, inputs.metadata.seq_lens):
            assert not tensor.any()


def _state(plan, block_size, num_groups=1):
    sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
    state = RequestState(
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_LEN,
        block_size=block_size,
        sampling=sampling,
        num_groups=num_groups,
    )
    state.apply(plan)
    return state


def test_only_one_token_rows_are_searched_for_tokens_in_flight(block_size):
    plan = _plan(random.Random(1), block_size, MAX_NUM_SEQS, decodes_only=True)
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, block_size=block_size
    )
    state = _state(plan, block_size)
    assert builder.build(plan, state).num_unresolved == 0
    landing = state.reserve_tokens(state.rows_of([plan.rows[2].request_id]))
    rows = tuple(
        row._replace(num_computed_tokens=row.num_computed_tokens + (i == 2)) for i, row in enumerate(plan.rows)
    )
    next_plan = replace(plan, rows=rows)
    batch = builder.build(next_plan, state)
    assert batch.num_unresolved == MAX_NUM_SEQS
    assert batch.inputs.input_ids[2] == -1 - landing.rows[0]
    state.write_tokens(landing, np.array([77]))
    batch = builder.build(next_plan, state)
    assert (batch.num_unresolved, int(batch.inputs.input_ids[2])) == (0, 77)


def test_every_batch_is_the_beginning_of_the_same_buffers(block_size):
    """As a recorded step reads them where they were when it was recorded."""
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, block_size=block_size
    )
    largest = list(_tensors(builder.largest()))
    tokens, rows = (MAX_TOKENS,), (MAX_NUM_SEQS,)
    table = (MAX_NUM_SEQS, -(-MAX_LEN // block_size))
    assert [t.shape for t in largest] == [tokens, tokens, rows, (MAX_NUM_SEQS + 1,), rows, table, tokens]
    for seed in range(3):
        plan = _plan(random.Random(seed), block_size, 1 + seed, decodes_only=False)
        sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
        state = RequestState(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_LEN, block_size=block_size, sampling=sampling)
        state.apply(plan)
        for tensor, whole in zip(_tensors(builder.build(plan, state).inputs), largest, strict=True):
            assert tensor.data_ptr() == whole.data_ptr() or not tensor.numel()
            assert tensor.stride() == whole.stride()
            assert tensor.shape[1:] == whole.shape[1:]


@pytest.mark.parametrize("decodes_only", [False, True])
def test_adapted_tokens_are_those_of_requests_with_adapters_sorted_by_adapter(decodes_only):
    rng = random.Random(7)
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_LEN, "block_size": 4}
    stream = LateStream(0)
    builders = [
        BatchBuilder(**limits, max_num_batched_tokens=MAX_TOKENS, has_adapters=True),
        BatchBuilder(**limits, max_num_batched_tokens=MAX_TOKENS, has_adapters=True, stream=stream),
    ]
    for _ in range(20):
        plan = _plan(rng, 4, MAX_NUM_SEQS, decodes_only)
        adapters = {request.request_id: rng.choice([None, 0, 1, 2]) for request in plan.new_requests}
        new = tuple(request._replace(adapter=adapters[request.request_id]) for request in plan.new_requests)
        plan = replace(plan, new_requests=new)
        sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
        of_tokens = [adapters[row.request_id] for row in plan.rows for _ in range(row.num_scheduled_tokens)]
        expected = sorted((adapter, index) for index, adapter in enumerate(of_tokens) if adapter is not None)
        for builder in builders:
            state = RequestState(**limits, sampling=sampling)
            state.apply(plan)
            batch = builder.build(plan, state)
            batch.upload()
            adapted = batch.inputs.adapted
            assert list(zip(adapted.adapters.tolist(), adapted.indices.tolist(), strict=True)) == expected


def test_places_behind_adapted_tokens_have_no_adapter():
    """A recorded step reads as many as it has tokens; those of an earlier step must not count again."""
    limits = {"max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_LEN, "block_size": 4}
    builder = BatchBuilder(**limits, max_num_batched_tokens=MAX_TOKENS, has_adapters=True)
    whole = builder.largest().adapted
    plan = _plan(random.Random(7), 4, MAX_NUM_SEQS, decodes_only=False)
    num_tokens = sum(row.num_scheduled_tokens for row in plan.rows)
    for adapted_ids in ({row.request_id for row in plan.rows}, {plan.rows[0].request_id}):
        new = tuple(one._replace(adapter=1 if one.request_id in adapted_ids else None) for one in plan.new_requests)
        sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
        state = RequestState(**limits, sampling=sampling)
        state.apply(replace(plan, new_requests=new))
        batch = builder.build(replace(plan, new_requests=new), state)
        batch.upload()
        num_adapted = len(batch.inputs.adapted.adapters)
        assert whole.adapters[:num_adapted].tolist() == [1] * num_adapted
        assert whole.adapters[num_adapted:num_tokens].tolist() == [-1] * (num_tokens - num_adapted)
        assert whole.indices[num_adapted:num_tokens].tolist() == [0] * (num_tokens - num_adapted)
    assert 0 < num_adapted < num_tokens


def test_a_model_without_adapters_has_no_adapted_tokens():
    builder = BatchBuilder(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8, block_size=4)
    assert builder.largest().adapted is None
