"""Attention between the graphs of a step gets the batch of each replay, with the blocks of its layer's group."""

from dataclasses import replace

import torch

from kernels.gpu.step_pieces import PieceRecorder
from kernels.metadata import GroupBlocks
from tests.support.kernels.batches import make_step_buffers


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
        seen.append((kv_cache, metadata.group, metadata.block_table.unique().tolist(), metadata.derived))
        return out

    def step(inputs):
        for layer, group in enumerate((1, 0, 1)):
            metadata = inputs.metadata.of_group(group)
            recorder.paged_attention(attend, torch.zeros(4, 2, 8), f"layer {layer}", metadata)
        return torch.zeros(2, 5)

    pieces = recorder.record(step, make_inputs(first_block=10))
    assert seen == []  # nothing attends while graphs are recorded
    metadata = make_inputs(first_block=20).metadata
    pieces.replay(metadata)
    assert [call[:3] for call in seen] == [("layer 0", 1, [21]), ("layer 1", 0, [20]), ("layer 2", 1, [21])]
    assert all(call[3] is metadata.derived for call in seen)  # plans of the batch are made once for all groups
