"""Linear layers: our kernels against every product that PyTorch's wheel has, layer after layer as in a model.

Claim: kernels of our own are worth their code. They hold at least PyTorch's best rate at every number of rows,
prepacked and private operations included, and what they compute does not depend on the number of rows.

Goal: at least the rate of the fastest other product at 1, 8, 32, 64 and 512 rows, in fp32 and in int8.

Method: the feed-forward input layer of the shape, so many of them that their weights lie in no cache; each contestant
goes through all of them once per round. Products of 8 bits get their input quantised already, ours quantises it: the
rest would have to be added to theirs.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch

from chairlift.bench.alternate import Samples, alternate
from chairlift.bench.benchmark import Benchmark, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES
from engine.bench.machine import fp32_products, int8_products
from kernels.cpu.ops import CpuOps
from kernels.cpu.threads import set_num_threads
from kernels.interface import Quantization

_ROWS = (1, 8, 32, 64, 512)
_BYTES = 256 * 2**20
_PAUSE_S = 0.1  # OpenMP's threads keep spinning after a product: the next contestant would pay for it


def run(settings: Settings) -> Outcome:
    """Measures every product at every number of rows."""
    shape = SHAPES["tiny" if settings.quick else settings.options.shape]
    size_in, size_out = shape.hidden_size, 2 * shape.intermediate_size
    rows = (1, 8) if settings.quick else _ROWS
    set_num_threads(settings.threads)
    results, raw = [], {}
    for precision, bytes_per_weight in (("fp32", 4), ("int8", 1)):
        num_layers = 2 if settings.quick else math.ceil(_BYTES / (size_in * size_out * bytes_per_weight))
        for num_rows in rows:
            settings.progress(f"{precision}, {num_rows} rows, {num_layers} layers of {size_in} x {size_out}")
            make = fp32_products if precision == "fp32" else int8_products
            layers = [make(num_rows, size_in, size_out) for _ in range(num_layers)]
            contestants = {name: _seconds_of([layer[name] for layer in layers], settings.threads) for name in layers[0]}
            ours = f"{precision} ours"
            quantization: Quantization | None = "int8" if precision == "int8" else None
            contestants[ours] = _our_seconds(num_rows, size_in, size_out, num_layers, quantization, settings.threads)
            samples = alternate(contestants, rounds=settings.rounds, progress=settings.progress)
            raw[f"{precision} {num_rows}"] = {"seconds": samples.raw, "layers": num_layers}
            results.append(_result(samples, ours, precision, num_rows, 2 * num_rows * size_in * size_out * num_layers))
    return Outcome(tuple(results), raw)


def _result(samples: Samples, ours: str, precision: str, num_rows: int, num_ops: int) -> Result:
    rival = min((name for name in samples.raw if name != ours), key=samples.best)
    ratio = samples.ratio(rival, ours)
    rates = ", ".join(f"{name} {num_ops / samples.best(name) / 1e9:,.0f}" for name in samples.raw)
    return Result(
        "linear", f"{precision}, {num_rows} rows: ours over the next best", ratio.best, "x", goal=1.0,
        note=f"{ratio}; GOP/s: {rates}",
    )  # fmt: skip


def _seconds_of(products: list[Callable[[], object]], threads: int) -> Callable[[], float]:
    def measure() -> float:
        torch.set_num_threads(threads)
        time.sleep(_PAUSE_S)
        started_s = time.perf_counter()
        for product in products:
            product()
        return time.perf_counter() - started_s

    return measure


def _our_seconds(
    num_rows: int, size_in: int, size_out: int, num_layers: int, quantization: Quantization | None, threads: int
) -> Callable[[], float]:
    """Ours as the engine runs them: recorded once, replayed as one call."""
    ops = CpuOps(quantization=quantization, num_threads=threads)
    x = torch.rand(num_rows, size_in)
    layers = [ops.pack_linear(torch.rand(size_out, size_in), None) for _ in range(num_layers)]
    return _seconds_of([ops.replayable(lambda: [ops.linear(x, layer) for layer in layers])], threads)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135M", help="whose layers (default: 135M)")


BENCHMARK = Benchmark("linear", (), "linear layers against every product of PyTorch's", run, _add_arguments)
