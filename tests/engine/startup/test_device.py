"""Selection of the device, and settings that it does not support."""

import os
import subprocess
import sys

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.startup.device import check_device, choose_device, kv_cache_dtype
from tests.hang import HANG_S

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DRAFTS = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}'}


@pytest.mark.parametrize(
    ("asked", "has_gpu", "device"),
    [("auto", True, GPU), ("auto", False, CPU), ("cpu", True, CPU), ("cuda", False, GPU), ("cuda", True, GPU)],
)
def test_a_gpu_is_used_if_present_or_requested(
    monkeypatch: pytest.MonkeyPatch, asked: str, has_gpu: bool, device: torch.device
) -> None:
    monkeypatch.setattr("engine.startup.device.has_gpu", lambda **_: has_gpu)
    assert choose_device(EngineConfig(model="any", device=asked)) == device  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "device", "words"),
    [
        ({"quantization": "fp8"}, CPU, "--quantization fp8 is not supported on a CPU: use int8"),
        ({"quantization": "int8"}, GPU, "--quantization int8 is not supported on a GPU: use fp8"),
        ({"kv_cache_dtype": "fp8"}, CPU, "--kv-cache-dtype fp8 is not supported on a CPU: use int8"),
        ({"kv_cache_dtype": "int8"}, GPU, "--kv-cache-dtype int8 is not supported on a GPU: use fp8"),
        ({"kv_cache_dtype": "bfloat16"}, GPU, "--kv-cache-dtype bfloat16 is a choice on a CPU only: .*--dtype"),
        ({"batch_invariant": True, "tensor_parallel_size": 2}, GPU, "--tensor-parallel-size 2 is not .* --batch-inv"),
        (
            {"batch_invariant": True, "attention_backend": "torch"},
            GPU,
            "--attention-backend torch .* --batch-inv",
        ),
        ({"batch_invariant": True, "kernels": "torch"}, GPU, "--batch-invariant is not .* --kernels torch"),
        (
            {**DRAFTS, "pipeline_parallel_size": 2},
            CPU,
            "--speculative-config is not .* --pipeline-parallel-size 2, where",
        ),
        ({**DRAFTS, "scheduling_policy": "slo"}, CPU, "--speculative-config is not .* --scheduling-policy slo, which"),
        ({**DRAFTS, "async_scheduling": True}, GPU, "--speculative-config is not supported with --async-scheduling: a"),
        (
            {**DRAFTS, "max_num_seqs": 4},
            CPU,
            "num_speculative_tokens 4 must be less than --max-num-seqs 4: a step draws",
        ),
        ({"kernels": "triton"}, CPU, "--kernels triton needs a GPU: use auto or torch, or --device cuda"),
        (
            {"kernels": "torch", "quantization": "int8"},
            CPU,
            "--quantization int8 is not supported with --kernels torch",
        ),
        ({"kernels": "torch", "kv_cache_dtype": "fp8"}, GPU, "--kv-cache-dtype fp8 is not .* with --kernels torch"),
        (
            {"tensor_parallel_size": 2, "quantization": "int8"},
            CPU,
            "--quantization int8 .* --tensor-parallel-size 2 on",
        ),
    ],
)
def test_settings_that_the_device_does_not_support_are_rejected(
    fields: dict[str, object], device: torch.device, words: str
) -> None:
    config = EngineConfig(model="any", **fields)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        check_device(config, device)


@pytest.mark.parametrize(
    ("fields", "device", "dtype"),
    [
        ({}, GPU, torch.bfloat16),
        ({"quantization": "fp8", "kv_cache_dtype": "fp8"}, GPU, torch.float8_e4m3fn),
        ({"quantization": "int8", "kv_cache_dtype": "int8", "batch_invariant": True}, CPU, torch.int8),
        ({"kv_cache_dtype": "fp8", "batch_invariant": True}, GPU, torch.float8_e4m3fn),
        ({"kernels": "triton", "quantization": "fp8"}, GPU, torch.bfloat16),
        ({"kernels": "torch"}, CPU, torch.bfloat16),
        ({"attention_backend": "torch", "kv_cache_dtype": "fp8"}, GPU, torch.float8_e4m3fn),
        ({"kv_cache_dtype": "bfloat16"}, CPU, torch.bfloat16),
    ],
)
def test_dtypes_that_the_device_supports_are_accepted(
    fields: dict[str, object], device: torch.device, dtype: torch.dtype
) -> None:
    config = EngineConfig(model="any", **fields)  # type: ignore[arg-type]
    check_device(config, device)
    assert kv_cache_dtype(config, torch.bfloat16) is dtype


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "bfloat16", "kernels": "torch"}, torch.float32),
        ({"dtype": "bfloat16", "tensor_parallel_size": 2}, torch.float32),
    ],
)
def test_the_cache_of_a_cpu_has_bfloat16_where_that_is_asked_for(fields: dict[str, object], dtype: torch.dtype) -> None:
    config = EngineConfig(model="any", **fields)  # type: ignore[arg-type]
    assert kv_cache_dtype(config, torch.float32) is dtype


@pytest.mark.parametrize(("flag", "threads"), [("None", "1"), ("1", "1")])
def test_there_are_no_more_threads_by_default_than_numba_may_start(flag: str, threads: str) -> None:
    """As where a module of a cluster sets its variable."""
    code = (
        "import torch; from engine.config import EngineConfig; from engine.startup.device import set_threads\n"
        f"print(set_threads(EngineConfig(model='', threads={flag}), torch.device('cpu')))"
    )
    environment = {**os.environ, "NUMBA_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=HANG_S
    )
    assert found.stdout.strip() == threads


def test_a_cpu_needs_no_triton() -> None:
    """As in the image for CPUs and on macOS, where there is none."""
    code = "import sys; sys.modules['triton'] = None; import engine.startup.build; import kernels.cpu.ops"
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True, check=False, timeout=HANG_S
    )
    assert found.returncode == 0, found.stderr
