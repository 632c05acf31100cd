"""Logits against `transformers` on random checkpoints of every architecture, with reference and with CPU operations.

Tolerance: 2e-5 absolute, in fp32, on logits of unit standard deviation. Each test prints its largest error (pytest -s).
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine.model.config import ModelConfig
from engine.model.loader import load_model
from kernels.metadata import AttentionMetadata
from kernels.ops import cpu_ops, reference_ops

TOLERANCE = 2e-5
BLOCK_SIZE = 16
PROMPT_LENS = [1, 37, 5, 64, 129]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW_FROM_LAYER_1 = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama without GQA": ("llama", {"num_key_value_heads": 4}),
    "llama odd head": ("llama", {"head_dim": 20}),
    "llama sharded": ("llama", {"max_shard_size": "40KB"}),
    "llama bfloat16": ("llama", {"dtype": "bfloat16"}),
    "llama float16": ("llama", {"dtype": "float16"}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {"sliding_window": 24}),  # not in use
    "qwen2 tied, window in some layers": ("qwen2", {"tie_word_embeddings": True, **WINDOW_FROM_LAYER_1}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases, window in some layers": ("qwen3", {"attention_bias": True, **WINDOW_FROM_LAYER_1}),
}


class Case(NamedTuple):
    config: ModelConfig
    path: Path
    prompts: list[torch.Tensor]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def case(request, make_checkpoint):
    """A checkpoint, prompts, and what `transformers` makes of them, one prompt at a time."""
    import transformers

    architecture, overrides = CHECKPOINTS[request.param]
    path = make_checkpoint(architecture, **overrides)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 211, (length,), generator=generator) for length in PROMPT_LENS]
    with torch.inference_mode():
        expected = [oracle(prompt[None]).logits[0] for prompt in prompts]
    return Case(ModelConfig.from_dir(path), path, prompts, expected)


def run(model, prompts, chunk_lens):
    """Logits of all prompt tokens, computed in steps: each gives every unfinished prompt its next chunk.

    chunk_lens: of each step, the last one for all steps to come.
    """
    config = model.config
    blocks_per_row = -(-max(map(len, prompts)) // BLOCK_SIZE)
    shuffled = torch.randperm(len(prompts) * blocks_per_row, generator=torch.Generator().manual_seed(1))
    block_table = shuffled.view(len(prompts), blocks_per_row).to(torch.int32)
    shape = (block_table.numel(), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_caches = [(torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in range(config.num_layers)]
    logits = [[] for _ in prompts]
    computed = [0] * len(prompts)
    step = 0
    while rows := [row for row, prompt in enumerate(prompts) if computed[row] < len(prompt)]:
        chunk_len = chunk_lens[min(step, len(chunk_lens) - 1)]
        positions = [torch.arange(computed[row], min(computed[row] + chunk_len, len(prompts[row]))) for row in rows]
        query_lens = torch.tensor([0, *map(len, positions)])
        slots = [
            block_table[row, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for row, p in zip(rows, positions, strict=True)
        ]
        for row, p in zip(rows, positions, strict=True):
            computed[row] += len(p)
        metadata = AttentionMetadata(
            query_start_loc=query_lens.cumsum(0).to(torch.int32),
            seq_lens=torch.tensor([computed[row] for row in rows], dtype=torch.int32),
            block_table=block_table[rows],
            slot_mapping=torch.cat(slots).long(),
            block_size=BLOCK_SIZE,
            max_query_len=int(query_lens.max()),
            max_seq_len=max(computed),
        )
        input_ids = torch.cat([prompts[row][p] for row, p in zip(rows, positions, strict=True)])
        hidden = model.forward(input_ids, torch.cat(positions), kv_caches, metadata)
        for row, part in zip(rows, model.compute_logits(hidden).split(query_lens[1:].tolist()), strict=True):
            logits[row].append(part)
        step += 1
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize(
    ("make_ops", "chunk_lens"),
    [
        pytest.param(reference_ops, [1000], id="reference, whole prompts"),
        pytest.param(cpu_ops, [1000], id="cpu, whole prompts"),
        pytest.param(cpu_ops, [17, 1, 40], id="cpu, chunks"),
    ],
)
def test_logits_equal_transformers(case, make_ops, chunk_lens):
    model = load_model(case.path, case.config, make_ops(), show_progress_bar=False)
    logits = run(model, case.prompts, chunk_lens)
    error = max(float((a - e).abs().max()) for a, e in zip(logits, case.expected, strict=True))
    print(f"largest error {error:.1e}, standard deviation {float(torch.cat(case.expected).std()):.2f}")  # noqa: T201
    assert logits[0].dtype is torch.float32
    assert error < TOLERANCE


def test_embeddings_are_shared_when_tied(make_checkpoint):
    path = make_checkpoint("llama", tie_word_embeddings=True)
    model = load_model(path, ModelConfig.from_dir(path), reference_ops(), show_progress_bar=False)
    assert model.lm_head is model.embed_tokens


def test_checkpoint_tensors_cover_every_parameter_once(make_checkpoint):
    path = make_checkpoint("qwen3", attention_bias=True)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, reference_ops(), load_format="dummy")
    tensors = model.checkpoint_tensors()
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors.values())
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    attributes = [vars(model), *(vars(layer) for layer in model.layers)]
    parameters = [p for values in attributes for p in values.values() if isinstance(p, torch.Tensor)]
    linears = [p for layer in model.layers for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    num_parameters = sum(p.numel() for p in parameters)
    num_parameters += sum(p.weight.numel() + (0 if p.bias is None else p.bias.numel()) for p in linears)
    assert sum(t.numel() for t in tensors.values()) == num_parameters
