"""Names of dtypes."""

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a dtype as flags and checkpoints write it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
