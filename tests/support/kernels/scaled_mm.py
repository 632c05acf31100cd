"""`torch._scaled_mm` without a GPU: its own rules, applied to fake CUDA tensors, and the product in fp32."""

import logging
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def use_checked_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, torch.dtype, bool]]:
    """Makes 8-bit layers call `torch._scaled_mm` on a CPU; it raises torch's errors for layouts that a GPU refuses.

    Returns: (number of rows, dtype of the result, whether a bias is fused) of each product, as they are computed.
    """
    scaled_mm: Any = torch._scaled_mm
    seen: list[tuple[int, torch.dtype, bool]] = []
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # logs each refusal with a trace

    def on_a_gpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Returns a CUDA tensor without memory, of the same layout."""
        if tensor is None:
            return None
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")

    def checked(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        **options: Any,
    ) -> torch.Tensor:
        with FakeTensorMode():
            operands = [on_a_gpu(tensor) for tensor in (a, b, scale_a, scale_b, bias)]
            scaled_mm(*operands, None, out_dtype, **options)
        assert bias is None or (bias.dtype is out_dtype and out_dtype is not torch.float32), "torch has no such bias"
        seen.append((a.shape[0], out_dtype, bias is not None))
        out = (a.float() @ b.float()) * scale_a * scale_b
        return (out if bias is None else out + bias.float()).to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", checked)
    monkeypatch.setattr("kernels.gpu.linear.has_scaled_products", lambda _device: True)
    return seen
