"""Errors about missing or unsupported GPUs, with a fake torch.cuda."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.startup.device import choose_device
from engine.startup.gpu import has_gpu, open_gpu
from kernels.gpu.targets import TARGETS

GIB = 2**30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two H200; attributes may be changed."""
    machine = SimpleNamespace(name="H200", major=9, minor=0, multi_processor_count=132, count=2, free=139 * GIB)
    monkeypatch.setattr(torch.version, "hip", None)
    for name, value in {
        "is_available": lambda: machine.count > 0,
        "device_count": lambda: machine.count,
        "set_device": lambda _: None,
        "get_device_properties": lambda _: machine,
        "mem_get_info": lambda _: (machine.free, 140 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return machine


def test_a_gpu_is_opened(machine: SimpleNamespace) -> None:
    assert has_gpu(needs_kernels=True)
    gpu = open_gpu(1, 0.5, needs_kernels=True)
    assert (gpu.device, gpu.target, gpu.num_processors) == (torch.device("cuda", 1), TARGETS["sm_90"], 132)
    assert (gpu.memory.free_bytes, gpu.memory.budget_bytes) == (139 * GIB, 70 * GIB)


def test_the_error_without_a_gpu_says_what_torch_detects(machine: SimpleNamespace) -> None:
    machine.count = 0
    assert not has_gpu(needs_kernels=True)
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no GPU; .*--device cpu"):
        open_gpu(0, 0.9, needs_kernels=True)


def test_more_ranks_than_gpus_are_rejected(machine: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size needs GPU 2, torch sees 2"):
        open_gpu(2, 0.9, needs_kernels=True)


def test_an_unsupported_gpu_is_not_used_unless_requested(
    machine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    machine.name, machine.major = "V100", 7
    assert not has_gpu(needs_kernels=True)
    assert len(caplog.records) == 1
    assert "V100 is sm_70; there are kernels for sm_75, sm_80" in caplog.text
    with pytest.raises(ConfigError, match=r"--device cuda: V100 is sm_70.* Use --kernels torch, .* or --device cpu"):
        open_gpu(0, 0.9, needs_kernels=True)


def test_any_gpu_serves_plain_pytorch_operations(machine: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    machine.name, machine.major = "V100", 7
    assert has_gpu(needs_kernels=False)
    assert not caplog.records
    gpu = open_gpu(0, 0.9, needs_kernels=False)
    assert gpu.target is None
    assert not gpu.has_bfloat16
    machine.major = 8
    assert open_gpu(0, 0.9, needs_kernels=False).has_bfloat16
    machine.major = 7
    config = EngineConfig(model="any", kernels="torch")
    assert choose_device(config).type == "cuda"
    assert choose_device(replace(config, kernels="auto")).type == "cpu"


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((7, 5), "sm_75"),
        ((8, 7), "sm_87"),
        ((10, 0), "sm_100"),
        ((10, 3), "sm_100"),
        ((11, 0), "sm_110"),
        ((12, 0), "sm_120"),
        ((12, 1), "sm_120"),
    ],
)
def test_nvidia_gpus_use_the_kernels_of_their_target(
    machine: SimpleNamespace, capability: tuple[int, int], target: str
) -> None:
    machine.major, machine.minor = capability
    opened = open_gpu(0, 0.9, needs_kernels=True).target
    assert opened == replace(TARGETS[target], arch=10 * capability[0] + capability[1])


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx950:sramecc+:xnack-", "gfx950"),
        ("gfx1102", "gfx1100"),
        ("gfx1151", "gfx1100"),
        ("gfx1201", "gfx1100"),
    ],
)
def test_amd_gpus_use_the_kernels_of_their_target(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, arch: str, target: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    machine.gcnArchName = arch
    assert open_gpu(0, 0.9, needs_kernels=True).target == replace(TARGETS[target], arch=arch.split(":")[0])
    machine.gcnArchName = "gfx1030"
    expected = r"gfx1030; there are kernels for .*gfx1201\. Use --kernels torch, .* or --device cpu"
    with pytest.raises(ConfigError, match=expected):
        open_gpu(0, 0.9, needs_kernels=True)
