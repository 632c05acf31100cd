"""Where kernels are measured: a GPU, or a CPU with Triton's interpreter to rehearse on."""

import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from kernels.gpu.targets import TARGETS, Target, target_of

_REHEARSED_TARGET = "sm_90"
_DISTRIBUTIONS = ("torch", "triton", "numpy", "transformers", "grpcio")
_SMI_FIELDS = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "power.limit")


@dataclass(frozen=True, slots=True)
class BenchDevice:
    """A device and what choosing sizes needs to know of it.

    Attributes:
        target: what kernels are compiled for; on a CPU one that is pretended.
        num_processors: multiprocessors.
        l2_bytes: of the cache that inputs must not fit into.
    """

    device: torch.device
    target: Target
    num_processors: int
    l2_bytes: int

    @property
    def is_gpu(self) -> bool:
        """Whether figures mean something."""
        return self.device.type == "cuda"


def open_device(name: str) -> BenchDevice:
    """The first GPU for "cuda", the processor for "cpu".

    Raises:
        RuntimeError: there is no GPU that PyTorch sees.
        UnsupportedTargetError: it is one that there are no kernels for.
    """
    if name != "cuda":
        return BenchDevice(torch.device("cpu"), TARGETS[_REHEARSED_TARGET], num_processors=4, l2_bytes=1 << 10)
    if not torch.cuda.is_available():
        raise RuntimeError(
            "PyTorch sees no GPU here; --device cpu --quick shows that everything works, without figures"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    return BenchDevice(device, target_of(device), properties.multi_processor_count, properties.L2_cache_size)


def describe_device(device: torch.device) -> dict[str, Any]:
    """The hardware and the software, for a report."""
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
    """Driver, clocks and limits as they are found; read, never set."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(_SMI_FIELDS, values, strict=False))
