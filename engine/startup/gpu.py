"""Opens a GPU of this machine and reads its properties."""

import logging
from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.startup.gpu_memory import GpuMemory
from kernels.gpu.targets import Target, UnsupportedTargetError, target_of
from kernels.gpu.tiles import has_latent_kernels

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU.

    Attributes:
        target: what its kernels are compiled for; None if there are none.
        num_processors: number of multiprocessors.
        memory: total and free memory when it was opened.
        has_bfloat16: whether its matrix units support bfloat16.
    """

    device: torch.device
    target: Target | None
    num_processors: int
    memory: GpuMemory
    has_bfloat16: bool = True


def has_gpu(*, needs_kernels: bool) -> bool:
    """Whether torch sees a GPU, with kernels for it if needed; logs the reason if it sees an unsupported one."""
    if not torch.cuda.is_available():
        return False
    if not needs_kernels:
        return True
    try:
        target_of(torch.device("cuda", 0))
    except UnsupportedTargetError as error:
        _log.warning("%s", error)
        return False
    return True


def takes_latents(device: torch.device) -> bool:
    """Whether there are kernels of attention over latents for a GPU; False for one that torch does not see."""
    try:
        return torch.cuda.is_available() and has_latent_kernels(target_of(device))
    except UnsupportedTargetError:
        return False


def open_gpu(index: int, utilization: float, *, needs_kernels: bool) -> Gpu:
    """Makes a GPU the current device of this process.

    Args:
        index: index among the GPUs that torch sees.
        utilization: fraction of its memory to use.
        needs_kernels: whether the Triton kernels are used, or plain PyTorch operations, which run on any GPU.
    Raises: ConfigError: there is no such GPU, or no kernels for it if needed, or its memory cannot be queried.
    """
    if not torch.cuda.is_available():
        built = "built without CUDA" if torch.version.cuda is None else f"built for CUDA {torch.version.cuda}"
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} ({built}) sees no GPU; check nvidia-smi and the installed "
            "torch, or use --device cpu"
        )
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--tensor-parallel-size needs GPU {index}, torch sees {torch.cuda.device_count()} GPUs: lower it, or make "
            "more visible with CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    try:
        target = _find_target(device, is_needed=needs_kernels)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except (UnsupportedTargetError, RuntimeError) as error:
        raise ConfigError(f"--device cuda: {str(error).splitlines()[0]}") from error
    properties = torch.cuda.get_device_properties(device)
    memory = GpuMemory(properties.name, total_bytes, free_bytes, utilization)
    kernels = "without kernels" if target is None else target.name
    _log.info("GPU %d: %s, %s, %.1f GiB", index, properties.name, kernels, total_bytes / 2**30)
    has_bfloat16 = torch.version.hip is not None or properties.major >= 8
    return Gpu(device, target, properties.multi_processor_count, memory, has_bfloat16)


def _find_target(device: torch.device, *, is_needed: bool) -> Target | None:
    try:
        return target_of(device)
    except UnsupportedTargetError:
        if is_needed:
            raise
        return None
