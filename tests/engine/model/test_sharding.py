"""A model divided among ranks: the shards are the whole model, and all ranks compute its logits.

Ranks are threads here, with a barrier in every collective; tests/engine/parallel tests processes.
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import load_model, weights_bytes
from engine.model.sharding import Sharding
from engine.parallel.group import SingleRank
from kernels.families import reference_ops
from kernels.metadata import AttentionMetadata
from tests.hang import HANG_S
from tests.support.engine.weights import BLOCK_SIZES, loaded_parts, save_block_scaled

BLOCK_SIZE = 16
PROMPT_LENS = [1, 37, 5, 64]
TOLERANCE = 2e-5

CHECKPOINTS = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama bfloat16 in shards": ("llama", {"dtype": "bfloat16", "max_shard_size": "40KB"}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"attention_bias": True}),
    "qwen2 with experts": ("qwen2_moe", {}),
    "qwen3 with experts": ("qwen3_moe", {}),
    "mixtral": ("mixtral", {}),
    "gpt-oss": ("gpt_oss", {}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo2 one KV head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo3": ("olmo3", {}),
    "phi3": ("phi3", {"partial_rotary_factor": 0.75}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {}),
    "gemma2": ("gemma2", {}),
    "glm4": ("glm4", {}),
    "qwen3.5": ("qwen3_5", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "qwen3.5 with experts, stored together": (
        "qwen3_5_moe",
        {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "joins_experts": True},
    ),
    "qwen3-next": ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    "gemma3": ("gemma3", {"attention_bias": True}),
}


class SharedTensors:
    """Shared state of a group of threads: a barrier and one tensor per rank."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=HANG_S)
        self.tensors = [None] * size


class ThreadGroup:
    """The collectives of one rank."""

    def __init__(self, rank, size, shared=None):
        self.rank = rank
        self.size = size
        self.stage, self.num_stages = 0, 1
        self._shared = shared

    def _gather(self, x):
        self._shared.tensors[self.rank] = x.clone()
        self._shared.barrier.wait()
        tensors = list(self._shared.tensors)
        self._shared.barrier.wait()
        return tensors

    def all_reduce(self, x):
        return x.copy_(sum(self._gather(x)))

    def all_gather_columns(self, x):
        return torch.cat(self._gather(x), dim=1)

    def broadcast(self, x):
        x.copy_(self._gather(x)[0])


def on_all_ranks(size, function):
    """Calls function(group) for every rank in parallel; returns the results."""
    shared = SharedTensors(size)
    with ThreadPoolExecutor(size) as executor:
        futures = [executor.submit(function, ThreadGroup(rank, size, shared)) for rank in range(size)]
        return [future.result() for future in futures]


def load(path, group=None, **options):
    groups = {} if group is None else {"group": group}
    config = ModelConfig.from_dir(path)
    return load_model(path, config, reference_ops(), **groups, **options)


def logits_of(model, group=None):
    """Returns the logits of the last token of each prompt, computed in one ragged step."""
    config = model.config
    if group is not None:
        config = Sharding.of(config, group).config_of(config)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, config.vocab_size, (length,), generator=generator) for length in PROMPT_LENS]
    blocks = [-(-length // BLOCK_SIZE) for length in PROMPT_LENS]
    block_table = torch.zeros(len(prompts), max(blocks), dtype=torch.int32)
    slots = []
    for row, (length, num_blocks) in enumerate(zip(PROMPT_LENS, blocks, strict=True)):
        first = sum(blocks[:row])
        block_table[row, :num_blocks] = torch.arange(first, first + num_blocks)
        slots.append(first * BLOCK_SIZE + torch.arange(length))
    starts = torch.tensor([0, *PROMPT_LENS]).cumsum(0)
    metadata = AttentionMetadata(
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(PROMPT_LENS, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=torch.cat(slots),
        block_size=BLOCK_SIZE,
        max_query_len=max(PROMPT_LENS),
        max_seq_len=max(PROMPT_LENS),
        state_slots=torch.arange(len(PROMPT_LENS), dtype=torch.int32),
    )
    ops = reference_ops()
    shape = (sum(blocks), BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    kv_caches = [ops.make_kv_cache(*shape, torch.float32) for _ in config.attention_layers]
    positions = torch.cat([torch.arange(length) for length in PROMPT_LENS])
    model.allocate_states(len(prompts))
    hidden = model.forward(torch.cat(prompts), positions, kv_caches, metadata)
    return model.compute_logits(hidden[starts[1:] - 1])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_ranks_get_the_logits_of_one(make_checkpoint, name, size):
    architecture, overrides = CHECKPOINTS[name]
    path = make_checkpoint(architecture, **overrides)
    expected = logits_of(load(path))
    together = on_all_ranks(size, lambda group: logits_of(load(path, group), group))
    assert all(torch.equal(logits, together[0]) for logits in together), "gathered logits are copies"
    assert together[0].shape == expected.shape
    assert float((together[0] - expected).abs().max()) < TOLERANCE


def test_ranks_share_block_scaled_weights_by_whole_blocks(make_checkpoint, tmp_path):
    sizes = BLOCK_SIZES | {"intermediate_size": 768}
    path = save_block_scaled(make_checkpoint("llama", dtype="bfloat16", **sizes), tmp_path / "blocks")
    expected = logits_of(load(path))
    together = on_all_ranks(2, lambda group: logits_of(load(path, group), group))
    assert all(float((logits - expected).abs().max()) < TOLERANCE for logits in together)
    message = (
        r"--tensor-parallel-size gives each rank 192 rows and 256 columns of model\.layers\.0\.mlp\.gate_proj, whose "
        r"scales are per block of 128 x 128: use fewer ranks"
    )
    with pytest.raises(ConfigError, match=message):
        load(path, ThreadGroup(1, 4))


def test_more_ranks_than_rows_of_the_vocabulary_can_fill(make_checkpoint):
    """9 tokens on 4 ranks: 3 rows each, and none for the last one."""
    path = make_checkpoint("llama", vocab_size=9)
    expected = logits_of(load(path))
    (together, *_) = on_all_ranks(4, lambda group: logits_of(load(path, group), group))
    assert float((together - expected).abs().max()) < TOLERANCE


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_are_the_same_model_on_any_number_of_ranks(make_checkpoint, size):
    path = make_checkpoint("qwen2")
    expected = logits_of(load(path, load_format="dummy", seed=5))
    (together, *_) = on_all_ranks(size, lambda group: logits_of(load(path, group, load_format="dummy", seed=5), group))
    assert float((together - expected).abs().max()) < TOLERANCE
    assert float((logits_of(load(path, load_format="dummy", seed=6)) - expected).abs().max()) > 0.1


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parts_are_those_of_the_file_and_cover_it(make_checkpoint, kv_heads):
    path = make_checkpoint("llama", num_key_value_heads=kv_heads, attention_bias=True)
    config = ModelConfig.from_dir(path)
    parts_of_rank = [loaded_parts(path, group=ThreadGroup(rank, 4)) for rank in range(4)]
    held = Counter()
    for name, stored in load_file(path / "model.safetensors").items():
        for parts in parts_of_rank:
            part = parts[name]
            assert torch.equal(part.tensor, part.read(stored))
            held[name] += part.tensor.numel()
        copies = 4 if "norm" in name or name.endswith("o_proj.bias") else 1
        if "k_proj" in name or "v_proj" in name:
            copies = 4 // kv_heads
        assert held[name] == copies * stored.numel(), name
    weights = [weights_bytes(config, torch.float32, group=ThreadGroup(rank, 4)) for rank in range(4)]
    assert max(weights) < weights_bytes(config, torch.float32) / 3


@pytest.mark.parametrize(
    ("overrides", "size", "message"),
    [
        ({}, 3, "num_attention_heads 4 is not a multiple of tensor_parallel_size 3"),
        ({"architecture": "qwen3_moe", "moe_intermediate_size": 41}, 2, "size of experts 41 is not a multiple of"),
        (
            {"architecture": "qwen2_moe", "shared_expert_intermediate_size": 49},
            2,
            "size of the shared expert 49 is not a multiple of",
        ),
        (
            {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "num_key_value_heads 3 is neither a multiple nor a divisor of tensor_parallel_size 2",
        ),
        ({"architecture": "qwen3_5"}, 4, "linear_num_key_heads 2 is not a multiple of tensor_parallel_size 4"),
        ({"intermediate_size": 111}, 2, "intermediate_size 111 is not a multiple of tensor_parallel_size 2"),
    ],
)
def test_a_model_that_cannot_be_divided_evenly_is_rejected(make_checkpoint, overrides, size, message):
    config = ModelConfig.from_dir(make_checkpoint(**{"architecture": "llama", **overrides}))
    with pytest.raises(ConfigError, match=message):
        Sharding.of(config, SingleRank(0, size))


def test_a_rank_sees_its_heads_and_the_whole_vocabulary(make_checkpoint):
    config = ModelConfig.from_dir(make_checkpoint("llama", num_key_value_heads=1))
    shard = Sharding.of(config, SingleRank(3, 4)).config_of(config)
    assert (shard.num_heads, shard.num_kv_heads, shard.intermediate_size) == (1, 1, 28)
    assert (shard.head_dim, shard.vocab_size, shard.hidden_size) == (16, 211, 64)
    assert shard.traits == config.traits
