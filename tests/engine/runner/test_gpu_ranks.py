"""A shard's recorded steps sum over two ranks in symmetric memory and by NCCL; the truth is the whole model.

Both ranks have equal shards, so that their collectives need no second process.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.request import SamplingParams
from engine.parallel.layout import RankLayout
from engine.parallel.process_group import ProcessGroup
from engine.parallel.symmetric_memory import SymmetricMemory
from kernels.families import reference_ops
from tests.support.engine.equal_ranks import fake_collectives
from tests.support.kernels.graphs import FakeGraphs

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="graphs and collectives are fakes")

HALF_VOCABULARY, HIDDEN_SIZE = 64, 64
ROW_BYTES = 4 * HIDDEN_SIZE
DECODE_SIZES, MIXED_SIZES = (1, 2, 4), (6, 12)
DIVIDED_COLUMNS = ("o_proj.weight", "down_proj.weight")
DIVIDED_ROWS = (*(f"{name}_proj.weight" for name in ("q", "k", "v", "gate", "up")), "lm_head.weight")


def save_whole(shard: Path, folder: Path) -> Path:
    """Writes the model of two ranks that both have the shard of rank 0, whose sum of embeddings is twice its own."""
    shutil.copytree(shard, folder)
    tensors = load_file(shard / "model.safetensors")
    for name, tensor in tensors.items():
        first = tensor.chunk(2, 1 if name.endswith(DIVIDED_COLUMNS) else 0)[0]
        if name.endswith(DIVIDED_COLUMNS):
            tensors[name] = torch.cat([first, first], 1)
        elif name.endswith(DIVIDED_ROWS):
            tensors[name] = torch.cat([first, first])
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = torch.cat([2 * first, 2 * first])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("failing", [(), pytest.param((12, 2), marks=pytest.mark.slow)])
def test_recorded_steps_of_two_ranks_give_the_tokens_of_the_whole_model(
    make_checkpoint: Callable[..., Path],
    engine_on: Callable[..., Any],
    gpu_ops: Callable[..., Any],
    gpu_device: torch.device,
    prompt: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    failing: tuple[int, ...],
) -> None:
    """Steps of up to 4 rows are one shot, of up to 6 tokens multicast, larger ones NCCL."""
    graphs = FakeGraphs()
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", graphs.end_allocation)
    graphs.failing = dict.fromkeys(failing, RuntimeError("not permitted"))
    ops = gpu_ops()
    compile_step = ops.compile_step
    ops.compile_step = lambda step, *args, **options: compile_step(graphs.recordable(step), *args, **options)

    sums = fake_collectives(monkeypatch)
    monkeypatch.setattr("engine.parallel.symmetric_memory._MAX_READ_BYTES", 2 * 4 * ROW_BYTES)
    monkeypatch.setattr("engine.parallel.symmetric_memory._MAX_MULTICAST_BYTES", 6 * ROW_BYTES)
    group = ProcessGroup(0, RankLayout(2), gpu_device)
    buffer = torch.empty(6 * HIDDEN_SIZE)
    group._symmetric_memory = SymmetricMemory(buffer, "0", 2, has_multicast=True)

    shard = make_checkpoint(
        "llama",
        hidden_size=HIDDEN_SIZE,
        vocab_size=2 * HALF_VOCABULARY,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    generator = random.Random(5)
    prompts = [
        prompt(
            [generator.randrange(3, HALF_VOCABULARY) for _ in range(length)],
            SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, ignore_end_token=True),
        )
        for length, max_tokens in ((1, 6), (3, 5), (10, 3))
    ]
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 12}
    sharded = engine_on(shard, ops, gpu_device, group)
    run = sharded.serve(prompts, decode_buckets=DECODE_SIZES, mixed_buckets=MIXED_SIZES, **limits)
    want = engine_on(save_whole(shard, tmp_path / "whole"), reference_ops()).serve(prompts, **limits)
    for answer, wanted in zip(run.answers, want.answers, strict=True):
        assert list(answer.token_ids) == [token_id % HALF_VOCABULARY for token_id in wanted.token_ids]
    assert set(graphs.replayed) == {*DECODE_SIZES, *MIXED_SIZES} - set(failing)
    assert {way for way, _ in sums} == {"one shot", "multimem", "nccl"}
