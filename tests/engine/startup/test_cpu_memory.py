"""The cache's size on a CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.runner.kv_cache import KVCachePlan
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress
from engine.startup.rank_task import make_task
from engine.startup.served_model import open_model


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_cache_memory_bytes": 3 * 2**40}, r"--kv-cache-memory-bytes 3298534883328 is 3,072 GiB"),
        ({"num_gpu_blocks_override": 2**31 - 1}, r"--num-gpu-blocks-override 2147483647 is [\d,]+ GiB"),
    ],
)
def test_a_cache_larger_than_the_memory_is_rejected(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], words: str
) -> None:
    monkeypatch.setattr("engine.startup.cpu_memory.available_memory_bytes", lambda: 2**40)
    config = EngineConfig(model=str(model_dir), device="cpu", threads=1, **flags)
    with pytest.raises(ConfigError, match=rf"{words}, the weights leave 1,024 GiB of the memory that is free"):
        build_engine(config, StartupProgress())


def plan_of(path: Path, **fields: Any) -> KVCachePlan:
    config = EngineConfig(
        model=str(path), device="cpu", load_format="dummy", max_num_seqs=8, max_model_len=64, **fields
    )
    plan = make_task(config, torch.device("cpu"), path, open_model(path, config, torch.device("cpu")), 1).kv_plan
    assert plan is not None
    return plan


def test_a_cache_is_sized_for_the_stage_with_most_layers_that_attend(make_checkpoint: Callable[..., Path]) -> None:
    """The first of two stages has more of them than the last one."""
    types = ["full_attention", "full_attention", "linear_attention", "full_attention"]
    path = make_checkpoint("qwen3_5", num_hidden_layers=4, layer_types=types)
    plan = plan_of(path, pipeline_parallel_size=2, kv_cache_memory_bytes=2**20)
    bytes_per_token = 2 * 2 * 2 * 16 * 4  # keys and values of two heads of 16 dimensions in two layers, in fp32
    snapshot_bytes = plan.num_snapshots * plan.bytes_per_snapshot
    assert 0 < snapshot_bytes <= 2**18
    assert plan.num_blocks == (2**20 - snapshot_bytes) // (plan.block_size * bytes_per_token)
    without = plan_of(path, pipeline_parallel_size=2, kv_cache_memory_bytes=2**20, enable_prefix_caching=False)
    assert (without.num_snapshots, without.num_blocks) == (0, 2**20 // (plan.block_size * bytes_per_token))


def test_memory_is_kept_for_the_states_of_a_machines_own_stages(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer keeps 3 tokens of 128 channels, and 4 heads of 16 x 16 numbers, of each request: 5,632 bytes."""
    path = make_checkpoint("qwen3_5", num_hidden_layers=4, layer_types=["linear_attention", "full_attention"] * 2)
    stages = {"pipeline_parallel_size": 2, "kv_cache_memory_bytes": 2**15}
    nodes = [{**stages, "nnodes": 2, "node_rank": node, "master_addr": "127.0.0.1:1"} for node in range(2)]
    monkeypatch.setattr("engine.startup.rank_task.bytes_beside_weights", lambda *_: 16 * 5632 - 1)
    with pytest.raises(ConfigError, match=r"--max-num-seqs 8: the model's layers keep 0\.01074 MiB of each request"):
        plan_of(path, **stages)
    for node in nodes:
        plan_of(path, **node)
    monkeypatch.setattr("engine.startup.rank_task.bytes_beside_weights", lambda *_: 8 * 5632 - 1)
    with pytest.raises(ConfigError, match=r"the model's layers keep 0\.005371 MiB of each request"):
        plan_of(path, **nodes[1])
