"""Linear layers: the vendor's matrix products through torch, in the model's dtype or with both sides in 8 bits (W8A8).

In 8 bits each row of activations and each output channel has a scale. Their product is applied to the accumulated sum,
so no precision is lost to the largest value of another row.
"""

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from kernels.fp8_weights import dequantized
from kernels.gpu.float8 import as_fnuz
from kernels.gpu.quantize import QuantizedRows, rows_in_8_bits
from kernels.gpu.targets import Target, UnsupportedTargetError

_log = logging.getLogger(__name__)

_MULTIPLE = 16
"""Sizes that `torch._scaled_mm` multiplies in 8 bits are multiples of this."""

_PACK_VALUES = 1 << 24
"""Weights quantised at a time: packing needs some 200 MB besides its result, whatever the size of the layer."""

_FAST_ACCUMULATION = True
"""Hopper's matrix units keep some 14 bits of the sums they build up in 8-bit products, unless sums are added up in fp32
every 128 inputs (DeepSeek-V3, arXiv:2412.19437, section 3.3.2: an error of nearly 2 % at K = 4,096 in the worst case).
Rounding both sides to 3 bits of mantissa already costs 3.7 %, and other W8A8 servers accumulate the same way."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """Weights of one layer.

    Attributes:
        weight: [out, in] in the model's dtype; or, in 8 bits, [in, out] with each output channel contiguous.
        scales: [1, out] fp32 of 8-bit weights (dequantized = weight * scales); None otherwise.
        bias: [out] in the model's dtype.
        dtype: of the model and of results.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    dtype: torch.dtype

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.weight.shape[1 if self.scales is None else 0]

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.weight.shape[0 if self.scales is None else 1]


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, *, quantization: Literal["fp8"] | None, target: Target
) -> PackedLinear:
    """Makes weights ready for `linear`.

    Args:
        weight: [out, in], fp32, fp16 or bf16; memory is shared unless it is quantised.
        bias: [out], same dtype.
        quantization: "fp8" rounds the weights to the target's 8-bit float, with one scale per output channel. A layer
            whose sizes are no multiples of 16 stays unquantized, with a log line.
        target: architecture of the GPU.
    Raises: UnsupportedTargetError: the target has no 8-bit products for this dtype.
    """
    if quantization is None or not _has_product(weight):
        return PackedLinear(weight, None, bias, weight.dtype)
    float8 = _require_product(target, weight.dtype)
    values = torch.empty(weight.shape, dtype=float8, device=weight.device)
    scales = torch.empty(1, len(weight), dtype=torch.float32, device=weight.device)
    num_rows = max(1, _PACK_VALUES // weight.shape[1])
    for rows in (slice(start, start + num_rows) for start in range(0, len(weight), num_rows)):
        exact = weight[rows].float()
        largest = exact.abs().amax(dim=1)
        scales[0, rows] = torch.where(largest > 1e-30, largest / torch.finfo(float8).max, 1.0)
        values[rows] = (exact / scales[0, rows, None]).to(float8)
    return PackedLinear(values.t(), scales, bias, weight.dtype)


def pack_quantized(
    values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, dtype: torch.dtype, target: Target
) -> PackedLinear:
    """Makes 8-bit weights of a checkpoint ready for `linear`.

    Args:
        values: [out, in] float8_e4m3fn; memory is shared where the target has this float.
        scales: per tensor, [1] or [], or per output channel, [out] or [out, 1]; weight = values * scales.
        bias: [out], dtype.
        dtype: of the model.
        target: architecture of the GPU. Values are converted to its 8-bit float if that is another one.

    Raises:
        ValueError: scales of another shape.
        UnsupportedTargetError: the target has no 8-bit products for this dtype.
    """
    num_out = values.shape[0]
    if scales.numel() != 1 and scales.shape not in ((num_out,), (num_out, 1)):
        raise ValueError(f"scales have shape {list(scales.shape)}, expected one for all or one for each of {num_out}")
    per_channel = scales.float().reshape(-1, 1).expand(num_out, 1)
    if not _has_product(values):
        return PackedLinear(dequantized(values, scales).to(dtype), None, bias, dtype)
    if _require_product(target, dtype) is torch.float8_e4m3fnuz:
        values, per_channel = as_fnuz(values), 2 * per_channel
    return PackedLinear(values.contiguous().t(), per_channel.t().contiguous(), bias, dtype)


def linear(x: torch.Tensor | QuantizedRows, packed: PackedLinear) -> torch.Tensor:
    """Returns x [T, in] @ weight [out, in]^T + bias [out], [T, out] in the model's dtype.

    Args:
        x: rows, quantised or not; converted first if they do not match the weights.
        packed: the layer.
    Raises: ValueError: rows of another width.
    """
    width = x.values.shape[1] if isinstance(x, QuantizedRows) else x.shape[1]
    if width != packed.in_features:
        raise ValueError(f"rows of x have {width} values, the layer takes {packed.in_features}")
    if packed.scales is None:
        rows = x.dequantized(packed.dtype) if isinstance(x, QuantizedRows) else x
        return torch.nn.functional.linear(rows, packed.weight, packed.bias)
    quantized = rows_in_8_bits(x, packed.weight.dtype, width, packed.dtype)
    if not has_scaled_products(packed.weight.device):
        return _dequantized_product(quantized, packed)
    is_bias_fused = packed.dtype is not torch.float32  # the library has no product with bias that ends in fp32
    out = torch._scaled_mm(
        quantized.values,
        packed.weight,
        scale_a=quantized.scales,
        scale_b=packed.scales,
        bias=packed.bias if is_bias_fused else None,
        out_dtype=packed.dtype,
        use_fast_accum=_FAST_ACCUMULATION,
    )
    return out if is_bias_fused or packed.bias is None else out.add_(packed.bias)


def has_scaled_products(device: torch.device) -> bool:
    """Tells whether torch multiplies in 8 bits on this device; elsewhere products are computed in fp32."""
    return device.type == "cuda"


def _dequantized_product(x: QuantizedRows, packed: PackedLinear) -> torch.Tensor:
    """Computes the product in fp32, on devices other than GPUs."""
    assert packed.scales is not None
    out = (x.values.float() @ packed.weight.float()) * x.scales * packed.scales
    return (out if packed.bias is None else out + packed.bias.float()).to(packed.dtype)


def _has_product(weight: torch.Tensor) -> bool:
    """Tells whether a layer [out, in] can be multiplied in 8 bits; logs its sizes if not."""
    if any(size % _MULTIPLE for size in weight.shape):
        _log_unquantized(*weight.shape)
        return False
    return True


@cache  # once for each shape: a model has it in every layer
def _log_unquantized(num_out: int, num_in: int) -> None:
    _log.warning(
        "linear layers of %d inputs and %d outputs are not quantized: 8-bit products take multiples of %d",
        num_in,
        num_out,
        _MULTIPLE,
    )


def _require_product(target: Target, dtype: torch.dtype) -> torch.dtype:
    float8 = target.require_fp8("--quantization fp8")
    if target.backend == "hip" and dtype is not torch.bfloat16:
        raise UnsupportedTargetError(
            f"--quantization fp8: {target.name} has 8-bit products for models in bfloat16, this one is {dtype}"
        )
    return float8
