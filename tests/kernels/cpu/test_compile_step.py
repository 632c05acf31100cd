"""A recorded step gives the bits of its operations called one by one, at every size."""

from dataclasses import replace

import pytest
import torch

from kernels.families import cpu_ops
from kernels.interface import LowRank, pack_adapters
from kernels.metadata import AdaptedTokens, StepInputs
from tests.support.kernels.batches import assert_same_bits, cache_tensors, make_metadata, make_step_buffers, normal

MAX_TOKENS, MAX_REQS, MAX_LEN, BLOCK_SIZE = 140, 9, 256, 32
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 6, 2, 32, 48, 70, 61
NUM_BLOCKS = MAX_REQS * MAX_LEN // BLOCK_SIZE + 4
WINDOWS = (None, 20)  # of the layers

# Query and sequence lengths of each step: small steps follow large ones, so that leftovers would be noticed.
STEPS = [
    ([1], [1]),
    ([1] * MAX_REQS, [1, 2, 31, 32, 33, 64, 200, 256, 77]),
    ([1, 5, 1, 40], [40, 5, 70, 256]),
    ([MAX_TOKENS], [MAX_TOKENS]),
    ([1], [250]),
    ([12], [12]),
    ([13, 1], [13, 9]),
    ([1, 1, MAX_TOKENS - 2], [3, 200, 256]),
]


class Model:
    """A model of two layers that uses every operation, with its own caches."""

    def __init__(self, ops, kv_dtype):
        self.ops = ops
        self.caches = [ops.make_kv_cache(NUM_BLOCKS, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, kv_dtype) for _ in WINDOWS]
        self.table = normal(VOCAB + 1, HIDDEN, seed=1)
        self.table[VOCAB] = torch.nan
        shapes = [(10 * HEAD_DIM, HIDDEN), (HIDDEN, 6 * HEAD_DIM), (2 * INNER, HIDDEN), (HIDDEN, INNER)]
        self.linears = [ops.pack_linear(normal(*s, seed=2) * s[1] ** -0.5, normal(s[0], seed=3)) for s in shapes]
        self.head = ops.pack_linear(self.table[:VOCAB].clone(), None)
        change = LowRank(normal(4, HIDDEN, seed=7), normal(10 * HEAD_DIM, 4, seed=8))
        parts = [LowRank(change.a, change.b[:50]), LowRank(change.a, change.b[:50], 100)]
        self.adapters = pack_adapters(ops, [[], [change], parts])
        angles = torch.outer(torch.arange(float(MAX_LEN)), 10000.0 ** -torch.arange(0, 1, 2 / HEAD_DIM))
        self.rotary = angles.cos(), angles.sin()
        self.norm, self.head_norms = normal(HIDDEN, seed=4), (normal(HEAD_DIM, seed=5), normal(HEAD_DIM, seed=6))

    def __call__(self, inputs):
        ops, metadata = self.ops, inputs.metadata
        qkv, o, gate_up, down = self.linears
        residual = ops.gather_rows(self.table, inputs.input_ids)
        x = ops.rms_norm(residual, self.norm, 1e-5)
        for cache, window in zip(self.caches, WINDOWS, strict=True):
            norms = self.head_norms if window else None
            projected = ops.linear(x, qkv)
            ops.add_adapters(projected, x, self.adapters, inputs.adapted)
            q = ops.rotate_and_store(
                projected, inputs.positions, *self.rotary, cache, metadata.slot_mapping,
                head_norms=norms, eps=1e-5,
            )  # fmt: skip
            x = ops.linear(ops.paged_attention(q, cache, metadata, scale=0.2, sliding_window=window), o)
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
            x = ops.linear(ops.gate_and_mul(ops.linear(x, gate_up), "silu_and_mul"), down)
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-5)
        return ops.linear(ops.gather_rows(x, inputs.logits_indices), self.head)


def make_buffers():
    """Makes buffers that hold NaN tokens and an unused block, so that reads beyond a step's inputs are noticed."""
    buffers = make_step_buffers(MAX_REQS, MAX_TOKENS, MAX_LEN // BLOCK_SIZE + 1, block_size=BLOCK_SIZE)
    buffers.input_ids.fill_(VOCAB)
    buffers.metadata.query_start_loc.zero_()
    buffers.metadata.slot_mapping.fill_(NUM_BLOCKS * BLOCK_SIZE - 1)
    adapted = AdaptedTokens(*(torch.zeros(MAX_TOKENS, dtype=torch.int64) for _ in range(2)))
    return replace(buffers, adapted=adapted)


def make_inputs(buffers, query_lens, seq_lens, seed):
    """Writes a step of new requests to the buffers; their blocks hold data of earlier requests, or zeros."""
    generator = torch.Generator().manual_seed(seed)
    metadata, num_blocks = make_metadata(query_lens, seq_lens, BLOCK_SIZE, generator=generator)
    assert num_blocks < NUM_BLOCKS

    def write(buffer, values):
        buffer[: len(values)] = values
        return buffer[: len(values)]

    whole = buffers.metadata
    whole.block_table[: len(seq_lens), : metadata.block_table.shape[1]] = metadata.block_table
    starts = metadata.query_start_loc
    num_tokens, sampling = int(starts[-1]), torch.arange(0, len(seq_lens), 2)
    adapters, order = torch.randint(-1, 3, (num_tokens,), generator=generator).sort()
    is_adapted = adapters >= 0
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens, strict=True)])
    return StepInputs(
        input_ids=write(buffers.input_ids, torch.randint(0, VOCAB, (num_tokens,), generator=generator)),
        positions=write(buffers.positions, positions),
        metadata=replace(
            metadata,
            query_start_loc=write(whole.query_start_loc, starts),
            seq_lens=write(whole.seq_lens, metadata.seq_lens),
            block_table=whole.block_table[: len(seq_lens)],
            slot_mapping=write(whole.slot_mapping, metadata.slot_mapping),
        ),
        logits_indices=write(buffers.logits_indices, (starts[1:] - 1).long()[sampling]),
        adapted=AdaptedTokens(
            write(buffers.adapted.indices, order[is_adapted]), write(buffers.adapted.adapters, adapters[is_adapted])
        ),
    )


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize(
    ("quantization", "kv_dtype"), [(None, torch.float32), ("int8", torch.int8)], ids=["fp32", "int8"]
)
def test_replays_give_the_bits_of_single_operations(num_threads, quantization, kv_dtype):
    recorded = Model(cpu_ops(quantization=quantization, num_threads=num_threads), kv_dtype)
    eager = Model(cpu_ops(quantization=quantization), kv_dtype)
    buffers = make_buffers()
    step = recorded.ops.compile_step(recorded, buffers)
    for seed, (query_lens, seq_lens) in enumerate(STEPS * 2):
        inputs = make_inputs(buffers, query_lens, seq_lens, seed)
        logits, wanted = step(inputs), eager(inputs)
        assert logits.shape == (-(-len(seq_lens) // 2), VOCAB)
        assert logits.isfinite().all()
        assert_same_bits(logits, wanted)
        for ours, theirs in zip(recorded.caches, eager.caches, strict=True):
            for part, expected in zip(cache_tensors(ours), cache_tensors(theirs), strict=True):
                assert torch.equal(part, expected)


def test_recording_computes_nothing():
    model, buffers = Model(cpu_ops(), torch.float32), make_buffers()
    model.ops.compile_step(model, buffers)
    assert not any(tensor.any() for cache in model.caches for tensor in cache_tensors(cache))


def test_two_steps_of_the_same_operations_are_independent():
    ops = cpu_ops(num_threads=2)
    models = [Model(ops, torch.float32) for _ in range(2)]
    buffers = [make_buffers() for _ in models]
    steps = [ops.compile_step(model, largest) for model, largest in zip(models, buffers, strict=True)]
    inputs = [make_inputs(largest, [1, 7], [40, 90], seed) for seed, largest in enumerate(buffers)]
    wanted = [Model(cpu_ops(), torch.float32)(these) for these in inputs]
    for _ in range(3):
        for step, these, logits in zip(steps, inputs, wanted, strict=True):
            assert_same_bits(step(these), logits)


def test_operations_work_after_a_failed_recording():
    ops = cpu_ops()

    def step(inputs):
        ops.gather_rows(torch.ones(4, 4), inputs.input_ids)
        raise RuntimeError("no such operation")

    with pytest.raises(RuntimeError, match="no such operation"):
        ops.compile_step(step, make_buffers())
    assert_same_bits(ops.gather_rows(torch.eye(3), torch.tensor([2])), torch.tensor([[0.0, 0.0, 1.0]]))


def test_a_recorded_step_reads_adapters_that_were_replaced_since():
    recorded, eager = Model(cpu_ops(num_threads=2), torch.float32), Model(cpu_ops(), torch.float32)
    rows = [(0, 10 * HEAD_DIM), (0, 50), (100, 150)]
    recorded.adapters = recorded.ops.reserve_adapters(3, 8, HIDDEN, rows)
    buffers = make_buffers()
    step = recorded.ops.compile_step(recorded, buffers)
    contents = [[], [], []]
    for seed, (query_lens, seq_lens) in enumerate(STEPS * 2):
        first, last = rows[seed % 3]
        rank = 1 + seed % 8
        change = LowRank(normal(rank, HIDDEN, seed=seed), normal(last - first, rank, seed=seed), first)
        contents[seed % 2] = [change] if seed % 5 else []
        contents[2] = [change]
        for index in (seed % 2, 2):
            recorded.ops.set_adapter(recorded.adapters, index, contents[index])
        eager.adapters = pack_adapters(eager.ops, contents)
        inputs = make_inputs(buffers, query_lens, seq_lens, seed)
        assert_same_bits(step(inputs), eager(inputs))
