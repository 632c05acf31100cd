"""Tensors as the arrays numba sees. One type and layout per argument, so that each kernel is compiled exactly once."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def check_fp32(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not fp32 on the CPU."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, CPU operations take float32 on cpu")


def flat_rows(tensor: torch.Tensor) -> tuple[Array, int]:
    """A tensor whose rows (all but its first dimension) are contiguous, as one flat array and the step from row to row.

    The array shares memory with the tensor, and spans what lies between its rows. Slices of it are contiguous for the
    compiler, which a strided view never is.

    Raises: ValueError: the rows are not contiguous.
    """
    if not tensor[:1].is_contiguous():
        raise ValueError(
            f"rows of shape {list(tensor.shape[1:])} with strides {tensor.stride()[1:]} are not contiguous"
        )
    row_size = tensor[:1].numel()
    step = tensor.stride(0) if tensor.shape[0] > 1 else row_size
    span = (tensor.shape[0] - 1) * step + row_size if tensor.shape[0] else 0
    return tensor.as_strided((span,), (1,)).numpy(), step


def block_array(cache: torch.Tensor, name: str) -> Array:
    """A KV cache tensor [num_blocks, block_size, num_kv_heads, head_dim] as an array on the same memory.

    Raises: ValueError: not contiguous.
    """
    if not cache.is_contiguous():
        raise ValueError(f"{name} of shape {list(cache.shape)} is not contiguous")
    return cache.numpy()


def fp32(value: float) -> np.float32:
    """A scalar in the kernels' precision."""
    return np.float32(value)
