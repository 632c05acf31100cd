"""Attention and the delta rule between the graphs of a step get the batch of each replay."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.gpu.ops import GpuOps
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.step_pieces import PieceRecorder
from kernels.gpu.targets import TARGETS
from kernels.metadata import GroupBlocks
from tests.support.kernels.batches import make_step_buffers, normal


def make_inputs(first_block):
    """Inputs of two cache groups with blocks from `first_block` on."""
    inputs = make_step_buffers(2, 4, 3)
    blocks = [
        GroupBlocks(torch.full((2, 3), first_block + group, dtype=torch.int32), torch.full((4,), 16 * group))
        for group in range(2)
    ]
    return replace(inputs, metadata=replace(inputs.metadata, **blocks[0]._asdict(), other_groups=(blocks[1],)))


def test_each_attention_gets_the_blocks_of_its_group(graphs):
    recorder = PieceRecorder(torch.cuda.graph_pool_handle(), torch.device("cpu"))
    seen = []

    def attend(q, kv_cache, *, metadata, out):
        seen.append((kv_cache.layer, metadata.group, metadata.block_table.unique().tolist(), metadata.derived))
        return out

    def step(inputs):
        for layer, group in enumerate((1, 0, 1)):
            metadata = inputs.metadata.of_group(group)
            cache = SimpleNamespace(layer=layer, value_dim=6)
            out = recorder.paged_attention(attend, torch.zeros(4, 2, 8), cache, metadata)
            assert out.shape == (4, 12)
        return torch.zeros(2, 5)

    pieces = recorder.record(step, make_inputs(first_block=10))
    assert seen == []  # nothing attends while graphs are recorded
    metadata = make_inputs(first_block=20).metadata
    pieces.replay(metadata)
    assert [call[:3] for call in seen] == [(0, 1, [21]), (1, 0, [20]), (2, 1, [21])]
    assert all(call[3] is metadata.derived for call in seen)  # plans of the batch are made once for all groups


@pytest.mark.parametrize("quantize", [None, torch.float8_e4m3fn])
def test_layers_and_sizes_share_the_memory_of_their_inputs_and_results(graphs, quantize):
    """Tensors of each layer and size that stay in use until the replay would add up."""
    recorder = PieceRecorder(torch.cuda.graph_pool_handle(), torch.device("cpu"))
    weights, seen = DeltaModel(False).weights[0], []

    def compute(x, gates, _weights, _states, *, metadata, out, quantize, group_size):
        parts = (out,) if quantize is None else (out.values, out.scales)
        assert metadata.num_reqs == 2
        assert all(len(part) == len(x) for part in (gates, *parts))
        seen.append(([tensor.data_ptr() for tensor in (x, gates, *parts)], x[0, 0].item(), gates[0, 0].item()))

    def step(inputs):
        for layer in range(2):
            x, gates = (inputs.positions[:, None] + 10 * layer + torch.zeros(1, n) for n in (NUM_COLUMNS, 2))
            recorder.delta_rule(compute, x, gates, weights, None, inputs.metadata, quantize=quantize)
        return torch.zeros(2, 5)

    buffers = make_inputs(first_block=10)
    pieces = [
        recorder.record(step, replace(buffers, positions=buffers.positions[:num_tokens])) for num_tokens in (4, 3)
    ]
    for number, recorded in enumerate(pieces):
        buffers.positions.fill_(number)
        recorded.replay(buffers.metadata)
    assert [call[1:] for call in seen] == [(0, 0), (10, 10), (1, 1), (11, 11)]
    assert all(call[0] == seen[0][0] for call in seen)


HEADS = DeltaHeads(num_key_heads=1, key_dim=16, num_value_heads=1, value_dim=16, conv_width=4)
NUM_COLUMNS = HEADS.num_channels + HEADS.value_size


class DeltaModel:
    """Two layers with states, one of attention between them, and logits of all that they return."""

    def __init__(self, is_quantized):
        self.is_quantized = is_quantized
        self.weights = [
            DeltaWeights(
                HEADS,
                conv=normal(HEADS.conv_width, HEADS.num_channels, seed=seed),
                decay=torch.full((1,), 0.1),
                dt_bias=normal(1, seed=seed + 1),
                norm=torch.ones(HEADS.value_dim),
                eps=1e-6,
            )
            for seed in (10, 20)
        ]
        self.states = [DeltaStates.zeros(HEADS, 5, torch.device("cpu")) for _ in range(2)]
        self.mixes = normal(7, NUM_COLUMNS + 2, seed=30), normal(HEADS.value_size, NUM_COLUMNS + 2, seed=31)
        self.head = normal(HEADS.value_size, 5, seed=32)

    def step(self, ops, inputs, attend=lambda q, _cache, _metadata: q.flatten(1)):
        """The attention in the middle doubles its queries, in steps that call it."""
        x = torch.nn.functional.one_hot(inputs.input_ids % 7, 7).float() @ self.mixes[0]
        for layer in range(2):
            columns = x[:, :NUM_COLUMNS], x[:, NUM_COLUMNS:]
            x = ops.delta_rule(*columns, self.weights[layer], self.states[layer], inputs.metadata)
            assert isinstance(x, QuantizedRows) == self.is_quantized
            if self.is_quantized:
                x = x.dequantized(torch.float32)
            if layer == 0:
                x = attend(x.view(len(x), 1, 16), SimpleNamespace(value_dim=16), inputs.metadata) @ self.mixes[1]
        logits = x[inputs.logits_indices] @ self.head
        return logits if inputs.logits is None else inputs.logits.copy_(logits)


def fill_rows(buffers, rows, num_tokens, num_padded_rows=0):
    """Writes rows (slot, tokens, tokens before) and padding to the buffers; returns views as the batch builder does."""
    whole, num_rows = buffers.metadata, len(rows) + num_padded_rows
    lengths = [length for _, length, _ in rows] + [1] * num_padded_rows
    whole.query_start_loc[: num_rows + 1] = torch.tensor([0, *lengths]).cumsum(0)
    whole.seq_lens[:num_rows] = torch.tensor([sum(row[1:]) for row in rows] + [0] * num_padded_rows)
    whole.state_slots[:num_rows] = torch.tensor([slot for slot, _, _ in rows] + [4] * num_padded_rows)
    buffers.input_ids[:num_tokens] = torch.tensor(
        [5 * slot + before + token for slot, length, before in rows for token in range(length)]
        + [3] * (num_tokens - sum(length for _, length, _ in rows))
    )
    buffers.logits_indices[: len(rows)] = whole.query_start_loc[1 : len(rows) + 1] - 1
    max_query_len = max(lengths)
    return replace(
        buffers,
        input_ids=buffers.input_ids[:num_tokens],
        positions=buffers.positions[:num_tokens],
        metadata=replace(
            whole,
            query_start_loc=whole.query_start_loc[: num_rows + 1],
            seq_lens=whole.seq_lens[:num_rows],
            state_slots=whole.state_slots[:num_rows],
            block_table=whole.block_table[:num_rows],
            slot_mapping=whole.slot_mapping[:num_tokens],
            max_query_len=max_query_len,
            num_one_token_reqs=num_rows if max_query_len == 1 else 0,
        ),
        logits_indices=buffers.logits_indices[: len(rows)],
    )


STEPS = [  # rows, tokens, and rows of padding; recorded in pieces, in pieces with padding, whole, whole with padding
    ([(2, 5, 0), (0, 3, 0)], 8, 0),
    ([(2, 1, 5), (0, 2, 3), (1, 1, 0)], 8, 0),
    ([(0, 1, 5), (1, 1, 1)], 2, 0),
    ([(2, 1, 6), (0, 1, 6), (1, 1, 2)], 4, 1),
    ([(1, 3, 3), (3, 1, 0)], 4, 0),  # not recorded
]


@pytest.mark.parametrize("quantizes", [False, True], ids=["fp32", "fp8"])
def test_recorded_steps_update_states_as_others_do(device, graphs, quantizes):
    """States and logits of both layers have the same bits as without graphs, after steps of all kinds."""
    if device.type == "cuda":
        pytest.skip("graphs are faked")
    eager, recorded = (
        GpuOps(device, TARGETS["sm_90"], num_processors=132, quantize_inputs=quantizes) for _ in range(2)
    )
    models = DeltaModel(quantizes), DeltaModel(quantizes)
    buffers = make_step_buffers(4, 8, 1)
    buffers = replace(buffers, metadata=replace(buffers.metadata, state_slots=torch.zeros(4, dtype=torch.int32)))

    def attend(q, _cache, metadata, *, out=None, **_options):
        return 2 * q.flatten(1) if out is None else out.copy_(2 * q.flatten(1))

    recorded._attention = attend

    def step(inputs):
        return models[1].step(
            recorded,
            inputs,
            lambda q, cache, metadata: recorded.paged_attention(q.clone(), cache, metadata, scale=1.0),
        )

    with torch.inference_mode():
        compiled = recorded.compile_step(graphs.recordable(step), buffers, (2, 4), (8,))
        assert recorded.unrecorded == []
        for states in models[1].states:
            assert not states.recurrent.any(), "padding has changed states"
        for rows, num_tokens, num_padded in STEPS:
            inputs = fill_rows(buffers, rows, num_tokens, num_padded)
            want = models[0].step(
                eager, replace(inputs, metadata=replace(inputs.metadata)), lambda q, *_: 2 * q.flatten(1)
            )
            assert torch.equal(compiled(inputs), want)
            for actual, expected in zip(models[1].states, models[0].states, strict=True):
                assert torch.equal(actual.recurrent, expected.recurrent)
                assert torch.equal(actual.conv, expected.conv)
    assert graphs.replayed == [8, 8, 2, 4]
