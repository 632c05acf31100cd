"""What kernels on rows of activations share: checks of their tensors, and how rows are divided among programs."""

from typing import Any

import torch
import triton

from kernels.gpu.launch import BoundKernel
from kernels.gpu.tiles import RowTile, column_tile, row_tile

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not [T, n], contiguous, in fp32, fp16 or bf16."""
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {list(tensor.shape)}, strides {tensor.stride()}; expected whole rows")
        _check_dtype(name, tensor)


def check_columns(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not [T, n], columns of the same or wider rows, in fp32, fp16 or bf16."""
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, strides {tensor.stride()}; expected columns of rows"
            )
        _check_dtype(name, tensor)


def bind_tiles(kernel: Any, n: int, itemsize: int, group_size: int, **sizes: Any) -> tuple[BoundKernel, int, int]:
    """Binds a kernel of results in the model's dtype or, by whole rows, in 8 bits.

    Args:
        kernel: takes the sizes N, GROUP_SIZE, BLOCK_M and BLOCK_N.
        n: values of a row of results.
        itemsize: bytes of a value of its inputs.
        group_size: values that share a scale in 8 bits; 0: the results are in the model's dtype.
        sizes: further compile-time sizes.
    Returns: the kernel, its rows per program and its programs per row.
    """
    if group_size:
        return *bind_rows(kernel, n, itemsize, GROUP_SIZE=group_size, **sizes), 1
    return bind_columns(kernel, n, GROUP_SIZE=0, **sizes)


def bind_rows(kernel: Any, n: int, itemsize: int, **sizes: Any) -> tuple[BoundKernel, int]:
    """Binds a kernel that takes whole rows; returns it and its rows per program."""
    tile = row_tile(n, itemsize)
    return _bound(kernel, n, tile, **sizes), tile.block_m


def bind_columns(kernel: Any, n: int, **sizes: Any) -> tuple[BoundKernel, int, int]:
    """Binds a kernel that takes columns of rows; returns it, its rows per program and its programs per row."""
    tile = column_tile(n)
    return _bound(kernel, n, tile, **sizes), tile.block_m, triton.cdiv(n, tile.block_n)


def _bound(kernel: Any, n: int, tile: RowTile, **sizes: Any) -> BoundKernel:
    return BoundKernel(kernel, N=n, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, num_warps=tile.num_warps, **sizes)


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, GPU operations take float32, float16 and bfloat16")
