"""Checks the tensors of kernels on rows of activations."""

import torch

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_rows(**tensors: torch.Tensor) -> None:
    """Raises ValueError: a tensor is not [T, n], contiguous, in fp32, fp16 or bf16."""
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(f"{name} has shape {list(tensor.shape)}, strides {tensor.stride()}; expected whole rows")
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, GPU operations take float32, float16 and bfloat16")
