"""What machines that share a model compare before they load it."""

from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.startup.rank_task import make_task
from engine.startup.rendezvous import facts_of
from engine.startup.served_model import open_model


def _facts(model_dir: Path, device: str, **fields: int) -> dict[str, str]:
    config = EngineConfig(model=str(model_dir), max_num_seqs=2, **fields)  # type: ignore[arg-type]
    on = torch.device(device)
    return facts_of(make_task(config, on, model_dir, open_model(model_dir, config, on), 1))


@pytest.mark.parametrize("given", [{"kv_cache_memory_bytes": 1 << 24}, {"num_gpu_blocks_override": 8}])
def test_gpus_measure_their_memory_on_all_machines_or_on_none(model_dir: Path, given: dict[str, int]) -> None:
    """Ranks measure it by a step that they compute together: one that does not take part is waited for in vain."""
    measured, sized = _facts(model_dir, "cuda"), _facts(model_dir, "cuda", **given)
    assert {name for name, value in measured.items() if sized[name] != value} == {"the size of the KV cache"}


def test_the_size_of_a_cache_may_differ_where_none_is_measured(model_dir: Path) -> None:
    assert _facts(model_dir, "cpu") == _facts(model_dir, "cpu", kv_cache_memory_bytes=1 << 24)
    assert _facts(model_dir, "cuda", num_gpu_blocks_override=8) == _facts(
        model_dir, "cuda", kv_cache_memory_bytes=1 << 24
    )
