"""Linear layers of a model for decode and prefill steps: in bf16, and in 8 bits with and without the rounding of the
activations.
"""

from collections.abc import Callable, Iterator

import torch

from kernels.bench.case import Case, Prepared, num_copies, relative_error
from kernels.bench.device import BenchDevice
from kernels.bench.dims import Dims
from kernels.dtypes import dtype_name
from kernels.gpu.linear import PackedLinear, linear, pack_linear
from kernels.gpu.quantize import QuantizedRows, quantize_rows
from kernels.gpu.tiled_linear import is_tiled, tiled_linear

_DTYPE = torch.bfloat16
_MAX_ERROR = 1e-2
_MAX_FLOAT8_ERROR = 6e-2  # both sides are rounded to 3 bits of mantissa and summed in fewer bits than fp32


def linear_cases(device: BenchDevice, dims: Dims, *, quick: bool) -> Iterator[Case]:
    """Yields the four matrices of a layer at each number of rows."""
    sizes = {
        "qkv": (dims.hidden_size, dims.qkv_size),
        "attention output": (dims.num_heads * dims.head_dim, dims.hidden_size),
        "gate and up": (dims.hidden_size, 2 * dims.intermediate_size),
        "down": (dims.intermediate_size, dims.hidden_size),
    }
    float8 = device.target.fp8_dtype
    for num_rows in (3,) if quick else (1, 64, 256, 2048, 8192):
        for name, (size_in, size_out) in sizes.items():
            yield _case(device, name, num_rows, size_in, size_out, None)
            if float8 is not None:
                yield _case(device, name, num_rows, size_in, size_out, float8)
                yield _case(device, name, num_rows, size_in, size_out, float8, is_rounded=True)


def _case(
    device: BenchDevice,
    name: str,
    num_rows: int,
    size_in: int,
    size_out: int,
    float8: torch.dtype | None,
    *,
    is_rounded: bool = False,
) -> Case:
    """Makes a case; with is_rounded the rows are 8-bit already, so that the time excludes their rounding."""
    weight_bytes = size_in * size_out * (2 if float8 is None else 1)
    row_bytes = size_in * (1 if is_rounded else 2) + 2 * size_out
    kind = "bf16" if float8 is None else "fp8, rows in fp8" if is_rounded else "fp8"
    return Case(
        what=f"linear {name} {size_in:,} -> {size_out:,}, {kind}, {num_rows:,} rows",
        prepare=lambda: _prepare(device, num_rows, size_in, size_out, float8, is_rounded, weight_bytes),
        num_bytes=weight_bytes + num_rows * row_bytes,
        num_flops=2 * num_rows * size_in * size_out,
        flops_dtype=dtype_name(float8 or _DTYPE),
        unit="us",
        max_error=_MAX_ERROR if float8 is None else _MAX_FLOAT8_ERROR,
    )


def _prepare(
    device: BenchDevice,
    num_rows: int,
    size_in: int,
    size_out: int,
    float8: torch.dtype | None,
    is_rounded: bool,
    weight_bytes: int,
) -> Prepared:
    calls: list[Callable[[], torch.Tensor]] = []
    for _ in range(num_copies(device, weight_bytes, most=16)):
        weight = torch.randn(size_out, size_in, device=device.device).mul_(size_in**-0.5).to(_DTYPE)
        packed = pack_linear(weight, None, quantization=None if float8 is None else "fp8", target=device.target)
        x = torch.randn(num_rows, size_in, device=device.device).to(_DTYPE)
        rows = quantize_rows(x, float8) if is_rounded and float8 is not None else x
        calls.append(_call(device, num_rows, rows, packed))
    last_call, last_x, last_weight = calls[-1], x, weight
    return Prepared(calls, lambda: relative_error(last_call(), last_x.float() @ last_weight.float().t()))


def _call(
    device: BenchDevice, num_rows: int, rows: torch.Tensor | QuantizedRows, packed: PackedLinear
) -> Callable[[], torch.Tensor]:
    """Returns a call of the product that the engine uses."""
    if not is_tiled(num_rows, packed, device.target):
        return lambda: linear(rows, packed)
    return lambda: tiled_linear(
        rows, packed, target=device.target, num_processors=device.num_processors, batch_invariant=False
    )
