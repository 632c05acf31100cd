"""Best rates of the device: a copy, and products of large matrices of normally distributed numbers.

A rate is that of the fastest tenth of the samples: after some tens of milliseconds of products a GPU reaches its power
limit and lowers its clocks (an H200 from 793 to 688 TFLOP/s in bf16), which short steps do not.
Products of zeros would draw less power and run at higher clocks. Other figures are compared with rates of the same run.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kernels.bench.timing import time_calls
from kernels.dtypes import dtype_name

_COPY_BYTES = 4 << 30  # of each of the two buffers, far above any cache size
_SIZE = 8192
_CPU_COPY_BYTES, _CPU_SIZE = 256 << 20, 1024
_QUICK_COPY_BYTES, _QUICK_SIZE = 1 << 22, 256


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured rates of a device.

    Attributes:
        bytes_per_s: device to device, bytes read and bytes written both counted.
        flops: by dtype ("bfloat16", "float8_e4m3fn", ...), per second; a multiply-add counts two;
            the best of the variants.
        samples_s: seconds of every sample, by measurement.
    """

    bytes_per_s: float
    flops: Mapping[str, float]
    samples_s: Mapping[str, tuple[float, ...]]

    def as_json(self) -> dict[str, Any]:
        """Returns the fields for a report."""
        return asdict(self)

    def __str__(self) -> str:
        rates = ", ".join(f"{name} {rate / 1e12:,.3g} TFLOP/s" for name, rate in self.flops.items())
        return f"copy {self.bytes_per_s / 1e9:,.4g} GB/s; products {rates}"


def measure_ceilings(
    device: torch.device, *, float8: torch.dtype | None = None, quick: bool = False, seconds: float = 0.5
) -> Ceilings:
    """Measures the rates, in a few seconds.

    Args:
        device: a GPU; on a CPU the products are of float32 alone.
        float8: the device's 8-bit float, if it has one.
        quick: use small sizes, whose rates are meaningless.
        seconds: approximate duration of each measurement.
    """
    num_bytes, size = (_COPY_BYTES, _SIZE) if device.type == "cuda" else (_CPU_COPY_BYTES, _CPU_SIZE)
    if quick:
        num_bytes, size = _QUICK_COPY_BYTES, _QUICK_SIZE
    copies = {name: time_calls([copy], device, seconds=seconds) for name, copy in _copies(device, num_bytes)}
    samples = {name: copy.samples_s for name, copy in copies.items()}
    flops: dict[str, float] = {}
    for name, product in _products(device, size, float8):
        timing = time_calls([product], device, seconds=seconds)
        samples[name] = timing.samples_s
        dtype = name.partition(" ")[0]
        flops[dtype] = max(flops.get(dtype, 0.0), 2 * size**3 / timing.fast_s)
    return Ceilings(2 * num_bytes / min(copy.fast_s for copy in copies.values()), flops, samples)


def _copies(device: torch.device, num_bytes: int) -> list[tuple[str, Callable[[], object]]]:
    """Returns a copy by the library and one by a kernel: in a graph, the former may use a slower copy engine."""
    source = torch.empty(num_bytes // 4, device=device).normal_()
    target = torch.empty_like(source)
    return [("copy", lambda: target.copy_(source)), ("copy by a kernel", lambda: torch.neg(source, out=target))]


def _products(device: torch.device, size: int, float8: torch.dtype | None) -> list[tuple[str, Callable[[], object]]]:
    """Returns square products by name: the dtype and, if there are several, the variant."""
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32,)
    products = [(dtype_name(dtype), _product(device, size, dtype)) for dtype in dtypes]
    if float8 is not None and device.type == "cuda":
        # Scales per tensor, and per row and channel as in `kernels.gpu.linear`.
        for variant, shapes in (("per tensor", ((), ())), ("per row", ((size, 1), (1, size)))):
            products.append((f"{dtype_name(float8)} {variant}", _scaled_product(device, size, float8, *shapes)))
    return products


def _product(device: torch.device, size: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: torch.mm(a, b.t())


def _scaled_product(
    device: torch.device, size: int, dtype: torch.dtype, rows: tuple[int, ...], columns: tuple[int, ...]
) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    scale_a, scale_b = (torch.ones(shape, device=device) for shape in (rows, columns))
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )
