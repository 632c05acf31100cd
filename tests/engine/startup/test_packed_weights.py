"""An engine with --packed-cache serves the same tokens from it, and has a file for each form of the weights."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.core.request import SamplingParams
from engine.errors import ConfigError
from engine.parallel.group import SINGLE_RANK, SingleRank
from engine.serving.parts import EngineParts
from engine.startup.build import build_engine
from engine.startup.device import check_device
from engine.startup.packed_weights import packed_cache
from engine.startup.progress import StartupProgress
from kernels.cpu import cpu_features
from kernels.families import cpu_ops, reference_ops
from tests.support.engine.small_engine import answer

FOUND = "Packed weights are those of an earlier start"


@pytest.fixture
def config(servable: Callable[..., Path], tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        model=str(servable("llama", dtype="bfloat16")),
        device="cpu",
        num_gpu_blocks_override=8,
        threads=1,
        packed_cache=tmp_path / "cache",
    )


def tokens(parts: EngineParts) -> list[int]:
    params = SamplingParams(seed=0, max_tokens=6, temperature=0.0, ignore_end_token=True)
    return answer(parts, (5, 6, 9, 40), params)


def wait_until_saved() -> None:
    for thread in threading.enumerate():
        if thread.name == "packed-cache":
            thread.join()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_second_start_serves_the_same_tokens_from_the_file(
    config: EngineConfig, quantization: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(config, quantization=quantization)
    wanted = tokens(build_engine(replace(config, packed_cache=None), StartupProgress()))
    starts = []
    with caplog.at_level("INFO"):
        for _ in range(2):
            caplog.clear()
            starts.append(tokens(build_engine(config, StartupProgress())))
            wait_until_saved()
    assert starts == [wanted, wanted]
    assert FOUND in caplog.text


def keys(config: EngineConfig, **options: Any) -> str:
    ops, dtype, group = (
        options.get(name, default)
        for name, default in (("ops", cpu_ops()), ("dtype", torch.bfloat16), ("group", SINGLE_RANK))
    )
    cache = packed_cache(config, Path(config.model), ops, dtype, group)
    assert cache is not None
    return cache.key()


def test_every_choice_that_changes_packed_weights_has_its_own_file(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        keys(config),
        keys(replace(config, quantization="int8")),
        keys(replace(config, dtype="bfloat16")),
        keys(config, dtype=torch.float32),
        keys(config, ops=reference_ops()),
        keys(config, group=SingleRank(0, 2)),
        keys(config, group=SingleRank(1, 2)),
        keys(config, group=SingleRank(0, 1, 0, 2)),
        keys(config, group=SingleRank(0, 1, 1, 2)),
    ]
    features = cpu_features.cpu_features()
    monkeypatch.setattr(cpu_features, "cpu_features", lambda: replace(features, bf16=not features.bf16))
    found.append(keys(config))
    assert len(set(found)) == len(found)
    assert keys(replace(config, max_num_seqs=7, served_model_name=("other",))) == found[-1]


def test_random_weights_and_starts_without_the_flag_have_no_cache(config: EngineConfig) -> None:
    for other in (replace(config, load_format="dummy"), replace(config, packed_cache=None)):
        assert packed_cache(other, Path(config.model), cpu_ops(), torch.float32, SINGLE_RANK) is None


def test_a_gpu_refuses_the_flag(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--packed-cache keeps the weights of a CPU: omit it, or use --device cpu"):
        check_device(config, torch.device("cuda"))
