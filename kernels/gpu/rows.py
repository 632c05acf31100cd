"""Checks the tensors of kernels on rows of activations."""

import torch

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


def _check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{name} is {tensor.dtype}, GPU operations take float32, float16 and bfloat16")
