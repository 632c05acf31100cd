"""Factories of the CPU operation families. Each is imported only when it is asked for.

Triton's family is `kernels.gpu.ops.GpuOps`: it takes a device and a target, so the engine makes it directly.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.interface import KernelOps, Quantization

if TYPE_CHECKING:
    from kernels.cpu.ops import CpuOps


def reference_ops() -> KernelOps:
    """Plain PyTorch in fp32."""
    from kernels.reference.ops import ReferenceOps

    return ReferenceOps()


def cpu_ops(
    *,
    quantization: Quantization | None = None,
    num_threads: int = 1,
    on_compiled: Callable[[int, int], None] = lambda _done, _total: None,
) -> "CpuOps":
    """Fast CPU operations; needs numba. Every kernel is compiled before it returns, or loaded from the disk.

    Args:
        quantization: of the weights of linear layers.
        num_threads: threads that compute, the caller's included.
        on_compiled: told how many kernels have been compiled, of how many there are; not of those loaded.
    """
    from kernels.cpu.ops import CpuOps

    return CpuOps(quantization=quantization, num_threads=num_threads, on_compiled=on_compiled)
