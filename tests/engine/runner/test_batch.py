"""Ragged batches against a plain loop over tokens."""

import random

import pytest
import torch

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import SamplingParams
from engine.runner.batch import BatchBuilder
from engine.runner.request_state import RequestState
from engine.runner.sampling_state import SamplingState

MAX_NUM_SEQS, MAX_TOKENS, MAX_LEN = 6, 40, 50
PARAMS = SamplingParams(seed=0, max_tokens=1)


def _plan(rng, block_size, num_rows, decodes_only):
    """A plan whose requests are all new, some of them with computed tokens already."""
    new, rows = [], []
    for request_id in rng.sample(range(100), num_rows):
        tokens = [rng.randrange(1000) for _ in range(rng.randint(1, MAX_LEN))]
        blocks = [rng.randrange(1000) for _ in range(-(-len(tokens) // block_size))]
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


@pytest.mark.parametrize("decodes_only", [False, True])
def test_batches_are_those_of_a_loop_over_tokens(block_size, decodes_only):
    rng = random.Random(block_size)
    builder = BatchBuilder(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, max_model_len=MAX_LEN, block_size=block_size
    )
    for num_rows in [1, 2, MAX_NUM_SEQS] * 20:
        plan = _plan(rng, block_size, num_rows, decodes_only)
        sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
        state = RequestState(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_LEN, block_size=block_size, sampling=sampling)
        state.apply(plan)
        batch = builder.build(plan, state)
        inputs, metadata = batch.inputs, batch.inputs.metadata

        requests = {request.request_id: request for request in plan.new_requests}
        input_ids, positions, slots, lasts = [], [], [], []
        for index, row in enumerate(plan.rows):
            request = requests[row.request_id]
            for position in range(row.num_computed_tokens, row.num_computed_tokens + row.num_scheduled_tokens):
                input_ids.append(request.token_ids[position])
                positions.append(position)
                slots.append(request.block_ids[position // block_size] * block_size + position % block_size)
            lasts.append(len(input_ids))
            num_used = -(-(positions[-1] + 1) // block_size)
            assert metadata.block_table[index, :num_used].tolist() == list(request.block_ids[:num_used])
        assert inputs.input_ids.tolist() == input_ids
        assert inputs.positions.tolist() == positions
        assert metadata.slot_mapping.tolist() == slots
        assert metadata.query_start_loc.tolist() == [0, *lasts]
        assert metadata.seq_lens.tolist() == [positions[last - 1] + 1 for last in lasts]
        assert metadata.max_query_len == max(row.num_scheduled_tokens for row in plan.rows)
        assert metadata.max_seq_len == max(positions) + 1
        sampling_rows = [index for index, row in enumerate(plan.rows) if row.samples]
        assert batch.sampling_rows.tolist() == sampling_rows
        assert inputs.logits_indices.tolist() == [lasts[index] - 1 for index in sampling_rows]
        assert batch.state_rows.tolist() == state.rows_of(plan.rows[i].request_id for i in sampling_rows).tolist()


def test_tensors_have_the_dtypes_and_layout_kernels_expect(block_size):
    plan = _plan(random.Random(0), block_size, 5, decodes_only=False)
    sampling = SamplingState(max_num_seqs=MAX_NUM_SEQS, vocab_size=1000, end_token_ids=())
    state = RequestState(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_LEN, block_size=block_size, sampling=sampling)
    state.apply(plan)
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
