"""The device of the benchmarks: a GPU, or a CPU with Triton's interpreter, to test them."""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from kernels.gpu.targets import TARGETS, Target, target_of

_CPU_TARGET = "sm_90"
_DISTRIBUTIONS = ("torch", "triton", "numpy", "transformers", "grpcio")
_SMI_FIELDS = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "power.limit")


@dataclass(frozen=True, slots=True)
class BenchDevice:
    """A device and the properties that decide sizes.

    Attributes:
        target: architecture that kernels are compiled for; on a CPU, the one whose tiles are used.
        num_processors: multiprocessors.
        l2_bytes: size of the L2 cache, which inputs must exceed.
    """

    device: torch.device
    target: Target
    num_processors: int
    l2_bytes: int

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU, so that figures are meaningful."""
        return self.device.type == "cuda"


def open_device(name: str) -> BenchDevice:
    """Opens the current GPU for "cuda", the processor for "cpu".

    Raises:
        RuntimeError: PyTorch sees no GPU.
        UnsupportedTargetError: the GPU is not supported.
    """
    if name != "cuda":
        return BenchDevice(torch.device("cpu"), TARGETS[_CPU_TARGET], num_processors=4, l2_bytes=1 << 10)
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU here; use --device cpu --quick to test the benchmark without one")
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return BenchDevice(device, target_of(device), properties.multi_processor_count, properties.L2_cache_size)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Describes hardware and software, for a report."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    about: dict[str, Any] = {"device": str(device), "versions": versions}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        about |= {
            "gpu": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "cuda": torch.version.cuda,
            "nvidia_smi": _nvidia_smi(),
        }
    return about


def _nvidia_smi() -> dict[str, str]:
    """Reads driver, clocks and limits."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False))
