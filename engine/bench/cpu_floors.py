"""Rates of the CPU (floors), measured just before a benchmark: reading memory, and matrix products."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from kernels.cpu.threads import set_num_threads
from kernels.families import cpu_ops
from kernels.interface import Quantization

# Far beyond any last-level cache; small enough for a machine with 4 GiB.
_READ_BYTES = 512 * 2**20
# Three fp32 matrices fit into a last-level cache, so that the rate is that of computing, not of reading.
_MATRIX_SIZE = 1024
_TURNS = 15


@dataclass(frozen=True, slots=True)
class Floors:
    """Best rates of the machine, measured on `threads` threads.

    Attributes:
        read_bytes_per_s: reading memory that is not cached.
        fp32_flops: operations of fp32 matrix products per second; a multiply-add counts two.
        int8_ops: the same of 8-bit integers.
        matrix_products: rate of every measured product, by name.
    """

    threads: int
    read_bytes_per_s: float
    fp32_flops: float
    int8_ops: float
    matrix_products: dict[str, float]

    @classmethod
    def unknown(cls, threads: int) -> "Floors":
        """Returns rates that were not measured (NaN)."""
        return cls(threads, math.nan, math.nan, math.nan, {})

    def as_json(self) -> dict[str, object]:
        """Returns the fields for a report."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.threads} threads: reads {self.read_bytes_per_s / 1e9:.1f} GB/s, "
            f"fp32 {self.fp32_flops / 1e9:,.0f} GFLOP/s, int8 {self.int8_ops / 1e9:,.0f} GOP/s"
        )


def measure_floors(threads: int, *, quick: bool = False) -> Floors:
    """Measures the rates, in about two seconds.

    Args:
        threads: CPU threads, for this measurement and for the rest of the process.
        quick: use tiny sizes, for a few milliseconds.
    """
    set_num_threads(threads)
    size, turns = (128, 1) if quick else (_MATRIX_SIZE, _TURNS)
    num_bytes = 2**20 if quick else _READ_BYTES
    array = torch.ones(num_bytes // 4)
    read_s = best_s(array.sum, turns)
    num_ops = 2 * size**3
    fp32_ways = {"fp32 Chairlift": chairlift_product(size, threads), **fp32_products(size, size, size)}
    int8_ways = {"int8 Chairlift": chairlift_product(size, threads, "int8"), **int8_products(size, size, size)}
    fp32 = {name: num_ops / best_s(product, turns) for name, product in fp32_ways.items()}
    int8 = {name: num_ops / best_s(product, turns) for name, product in int8_ways.items()}
    return Floors(
        threads=threads,
        read_bytes_per_s=num_bytes / read_s,
        fp32_flops=max(fp32.values()),
        int8_ops=max(int8.values()),
        matrix_products={**fp32, **int8},
    )


def fp32_products(rows: int, size_in: int, size_out: int) -> dict[str, Callable[[], object]]:
    """Returns PyTorch's products of x [rows, size_in] and a weight matrix by name; the last is private, prepacked."""
    x, weight = torch.rand(rows, size_in), torch.rand(size_out, size_in)
    transposed = weight.T.contiguous()
    products: dict[str, Callable[[], object]] = {
        "fp32 mm": lambda: torch.mm(x, transposed),
        "fp32 linear": lambda: torch.nn.functional.linear(x, weight),
    }
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

        def onednn() -> object:
            return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

        onednn()
    except (AttributeError, RuntimeError):  # built without oneDNN
        return products
    return {**products, "fp32 onednn": onednn}


def int8_products(rows: int, size_in: int, size_out: int) -> dict[str, Callable[[], object]]:
    """Returns the same for 8-bit integers: private operations of PyTorch that this build and this CPU support."""
    x = torch.randint(-127, 128, (rows, size_in), dtype=torch.int8)
    weight = torch.randint(-127, 128, (size_out, size_in), dtype=torch.int8)
    transposed = weight.T.contiguous()
    products: dict[str, Callable[[], object]] = {"int8 _int_mm": lambda: torch._int_mm(x, transposed)}
    x_u8, scales, zeros = x.view(torch.uint8), torch.ones(size_out), torch.zeros(size_out, dtype=torch.int32)
    try:
        onednn_weight = torch.ops.onednn.qlinear_prepack(weight, None)

        def onednn() -> object:
            return torch.ops.onednn.qlinear_pointwise(
                x_u8, 1.0, 128, onednn_weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )

        onednn()
    except (AttributeError, RuntimeError):  # built without oneDNN's quantised operations
        return products
    return {**products, "int8 onednn": onednn}


def chairlift_product(size: int, threads: int, quantization: Quantization | None = None) -> Callable[[], object]:
    """Returns a product of square matrices by Chairlift's kernels; in int8 the fp32 input is quantised first."""
    ops = cpu_ops(quantization=quantization, num_threads=threads)
    x, weights = torch.rand(size, size), ops.pack_linear(torch.rand(size, size), None)
    return lambda: ops.linear(x, weights)


def best_s(function: Callable[[], object], turns: int) -> float:
    """Returns the least seconds of a call, after a warm-up call."""
    function()
    times = []
    for _ in range(turns):
        started_s = time.perf_counter()
        function()
        times.append(time.perf_counter() - started_s)
    return min(times)
