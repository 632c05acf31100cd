"""Array types of the kernels, and the check of input tensors."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.dtypes import dtype_name

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint32]
Longs = npt.NDArray[np.int64]


_STORED = (torch.float32, torch.bfloat16, torch.float16)


def check_stored(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not of a type in which weights are stored, on the CPU."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _STORED or tensor.device.type != "cpu":
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device}, CPU operations take weights in float32, bfloat16 or "
                "float16 on cpu"
            )


def check_fp32(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not fp32 on the CPU."""
    for name, tensor in tensors.items():
        if tensor.dtype is not torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, CPU operations take float32 on cpu")


def check_integers(dtype: torch.dtype, **tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not of this dtype on the CPU, or its last dimension is not contiguous."""
    for name, tensor in tensors.items():
        has_gaps = tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        if tensor.dtype is not dtype or tensor.device.type != "cpu" or has_gaps:
            raise ValueError(
                f"{name} is {dtype_name(tensor.dtype)} on {tensor.device} with strides {tensor.stride()}, CPU "
                f"operations take {dtype_name(dtype)} on cpu without gaps"
            )
