"""Flags of the GPU benchmarks."""

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.bench.gpu.setting import GpuSetting, add_gpu_arguments


@pytest.mark.parametrize(
    ("argv", "is_gpu", "is_eager", "label"),
    [
        ([], True, False, "tiny bf16"),
        (["--enforce-eager"], True, True, "tiny bf16, eager"),
        ([], False, True, "tiny bf16"),
    ],
)
def test_engines_run_without_graphs_on_request_and_on_a_cpu(
    argv: list[str], is_gpu: bool, is_eager: bool, label: str
) -> None:
    parser = argparse.ArgumentParser()
    add_gpu_arguments(parser)
    unused: Any = None
    setting = GpuSetting(
        device=SimpleNamespace(is_gpu=is_gpu),  # type: ignore[arg-type]
        shape="tiny",
        model_dir=Path("model"),
        floor=SimpleNamespace(precision=SimpleNamespace(name="bf16", kv_bytes=2)),  # type: ignore[arg-type]
        ceilings=unused,
        budget=unused,
        journal=unused,
        threads=1,
        quick=False,
        enforce_eager=parser.parse_args(argv).enforce_eager,
        progress=unused,
    )
    config = setting.engine_config(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16)
    assert config.enforce_eager is is_eager
    assert setting.label == label
