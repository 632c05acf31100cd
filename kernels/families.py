"""Factories of the operation families. Each is imported only when it is asked for.

Triton's family is `kernels.gpu.ops.GpuOps`: it takes a device and a target, so the engine makes it directly.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kernels.interface import Quantization

if TYPE_CHECKING:
    import torch

    from kernels.cpu.ops import CpuOps
    from kernels.reference.ops import ReferenceOps


def reference_ops(device: "torch.device | str" = "cpu") -> "ReferenceOps":
    """Returns the operations in plain fp32 PyTorch, with caches on a device: slow, and the reference for the others."""
    from kernels.reference.ops import ReferenceOps

    return ReferenceOps(device)


def cpu_ops(
    *,
    quantization: Quantization | None = None,
    multiplies_in_bf16: bool = False,
    num_threads: int = 1,
    on_compiled: Callable[[int, int], None] = lambda _done, _total: None,
) -> "CpuOps":
    """Returns the fast CPU operations (needs numba), with every kernel compiled or loaded from the disk cache.

    Args:
        quantization: of the weights of linear layers.
        multiplies_in_bf16: whether linear layers with weights in bf16, but the output head and routers, round their
            inputs to bf16; the CPU must have AVX512-BF16.
        num_threads: threads that compute, including the caller's.
        on_compiled: called with (kernels compiled, kernels in total) after each compile, not after a load.
    """
    from kernels.cpu.ops import CpuOps

    return CpuOps(
        quantization=quantization,
        multiplies_in_bf16=multiplies_in_bf16,
        num_threads=num_threads,
        on_compiled=on_compiled,
    )
