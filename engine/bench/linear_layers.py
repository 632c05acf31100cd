"""Linear layers: Chairlift's kernels against every product in PyTorch's wheel, layer after layer as in a model.

Claim: Chairlift's kernels reach at least PyTorch's best rate at every number of rows, prepacked and private operations
included, and their results do not depend on the number of rows. Weights stored in bf16 are no slower than in fp32.

Goal: at least the rate of the fastest other product at 1, 8, 32, 64 and 512 rows, in fp32 and in int8. With weights in
bf16, at least the rate of the same kernels in fp32; products of bf16 inputs, PyTorch's and, where the CPU has
AVX512-BF16, Chairlift's, are printed beside them.

Method: copies of the feed-forward input layer of the shape whose weights together exceed the caches; each variant runs
all of them once per round. PyTorch's 8-bit products get a quantised input; Chairlift's time includes the quantisation.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES
from engine.bench.cpu_floors import fp32_products, int8_products
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.ops import CpuOps
from kernels.cpu.threads import set_num_threads

_ROWS = (1, 8, 32, 64, 512)
_BYTES = 256 * 2**20
_PAUSE_S = 0.1  # OpenMP's threads keep spinning after a product, at the cost of the next variant


def _bf16_products(rows: int, size_in: int, size_out: int) -> dict[str, Callable[[], object]]:
    """Returns PyTorch's product of bf16 inputs and weights."""
    x, weight = torch.rand(rows, size_in).bfloat16(), torch.rand(size_out, size_in).bfloat16()
    return {"bf16 linear": lambda: torch.nn.functional.linear(x, weight)}


_IN_BF16 = "bf16 inputs Chairlift"
_PRODUCTS = {"fp32": fp32_products, "bf16": _bf16_products, "int8": int8_products}


def run(settings: Settings) -> Outcome:
    """Measures every product at every number of rows."""
    shape = SHAPES["tiny" if settings.quick else settings.options.shape]
    size_in, size_out = shape.hidden_size, 2 * shape.intermediate_size
    rows = (1, 8) if settings.quick else _ROWS
    set_num_threads(settings.threads)
    results, raw = [], {}
    for precision, bytes_per_weight in (("fp32", 4), ("bf16", 2), ("int8", 1)):
        num_layers = 2 if settings.quick else math.ceil(_BYTES / (size_in * size_out * bytes_per_weight))
        for num_rows in rows:
            settings.progress(f"{precision}, {num_rows} rows, {num_layers} layers of {size_in} x {size_out}")
            make = _PRODUCTS[precision]
            layers = [make(num_rows, size_in, size_out) for _ in range(num_layers)]
            variants = {name: seconds_of([layer[name] for layer in layers], settings.threads) for name in layers[0]}
            chairlift = f"{precision} Chairlift"
            others = ("fp32 Chairlift", *([_IN_BF16] if cpu_features().bf16 else [])) if precision == "bf16" else ()
            for name in (chairlift, *others):
                variants[name] = _chairlift_seconds(name, num_rows, size_in, size_out, num_layers, settings.threads)
            samples = alternate(variants, rounds=settings.rounds, progress=settings.progress)
            raw[f"{precision} {num_rows}"] = {"seconds": samples.raw, "layers": num_layers}
            results.append(
                _result(samples, chairlift, precision, num_rows, 2 * num_rows * size_in * size_out * num_layers)
            )
    return Outcome(tuple(results), raw)


def _result(samples: Samples, chairlift: str, precision: str, num_rows: int, num_ops: int) -> Result:
    rival, against = "fp32 Chairlift", "fp32"
    if precision != "bf16":
        rival, against = min((name for name in samples.raw if name != chairlift), key=samples.best), "the next best"
    ratio = samples.ratio(rival, chairlift)
    rates = ", ".join(f"{name} {num_ops / samples.best(name) / 1e9:,.0f}" for name in samples.raw)
    return Result(
        "linear", f"{precision}, {num_rows} rows: Chairlift over {against}", ratio.best, "x", goal=1.0,
        note=f"{ratio}; GOP/s: {rates}",
    )  # fmt: skip


def seconds_of(products: list[Callable[[], object]], threads: int) -> Callable[[], float]:
    """Returns a measurement of all products, one after the other."""

    def measure() -> float:
        torch.set_num_threads(threads)
        time.sleep(_PAUSE_S)
        started_s = time.perf_counter()
        for product in products:
            product()
        return time.perf_counter() - started_s

    return measure


def _chairlift_seconds(
    name: str, num_rows: int, size_in: int, size_out: int, num_layers: int, threads: int
) -> Callable[[], float]:
    """Times Chairlift's layers as the engine runs them: recorded once, replayed as one call."""
    ops = CpuOps(
        quantization="int8" if name.startswith("int8") else None,
        multiplies_in_bf16=name == _IN_BF16,
        num_threads=threads,
    )
    dtype = torch.bfloat16 if name.startswith("bf16") else torch.float32
    x = torch.rand(num_rows, size_in)
    layers = [ops.pack_linear(torch.rand(size_out, size_in, dtype=dtype), None) for _ in range(num_layers)]
    return seconds_of([ops.replayable(lambda: [ops.linear(x, layer) for layer in layers])], threads)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="135M", help="model shape that defines the layers (default: 135M)"
    )
