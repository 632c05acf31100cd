"""Linear layers on weights in groups: Chairlift's kernels on K-quants, 4-bit floats and others, against bf16 and fp32.

Claim: with one row, weights of b bits take about b / 16 of the time of bf16. With inputs in int8
(`--quantization int8`) many rows are faster than in fp32 too.

Goal: no form takes longer than bf16 with one row, nor with inputs in int8 at any number of rows.

Method: copies of the feed-forward input layer of the shape whose weights together exceed the caches; each variant runs
all of them once per round. The rate of reading that fp32 reaches with one row is the machine's: it does nothing else.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from chairlift.bench.alternate import alternate
from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.shapes import SHAPES
from engine.bench.linear_layers import seconds_of
from kernels.cpu.ops import CpuOps
from kernels.cpu.packed_linear import PackedLinear
from kernels.cpu.threads import set_num_threads
from kernels.grouped_weights import GroupedWeights, Superblocks
from kernels.microscaled_weights import Fp4Weights, MicroscaledWeights, NvFp4Weights
from kernels.scale_groups import MXFP4_GROUP_SIZE, NVFP4_GROUP_SIZE

_ROWS = (1, 16, 32)
_BYTES = 128 << 20
_INT8_INPUTS = ", inputs in int8"


def _superblocks(num_out: int, num_in: int, group_size: int, num_bits: int) -> GroupedWeights:
    """Makes random weights; those of 6 bits have a zero point, as in Q6_K."""
    units = torch.full((num_out, num_in // 256), 1e-4, dtype=torch.float16)
    codes = torch.randint(1, 64, (num_out, num_in // group_size), dtype=torch.int8)
    offset_units, offset_codes = (-32 * units, codes) if num_bits == 6 else (units, codes.flip(1))
    blocks = Superblocks(units, codes, offset_units, offset_codes)
    values = torch.randint(0, 1 << num_bits, (num_out, num_in), dtype=torch.uint8)
    return GroupedWeights(values, blocks.scales, blocks.offsets, num_bits, superblocks=blocks)


def _groups(num_out: int, num_in: int, group_size: int, num_bits: int) -> GroupedWeights:
    """Makes random weights with scales in fp16 and the zero point in the middle."""
    scales = torch.rand(num_out, num_in // group_size).half().float()
    values = torch.randint(0, 1 << num_bits, (num_out, num_in), dtype=torch.uint8)
    return GroupedWeights(values, scales, -(1 << num_bits - 1) * scales, num_bits)


def _codes(num_out: int, num_in: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8)


def _nvfp4(num_out: int, num_in: int) -> NvFp4Weights:
    """Makes random weights; scales are those from 2 ** -6 on, as tools choose them."""
    scales = torch.randint(8, 127, (num_out, num_in // NVFP4_GROUP_SIZE), dtype=torch.uint8)
    return NvFp4Weights(_codes(num_out, num_in), scales.view(torch.float8_e4m3fn), torch.rand(num_out))


def _mxfp4(num_out: int, num_in: int) -> MicroscaledWeights:
    exponents = torch.randint(110, 127, (num_out, num_in // MXFP4_GROUP_SIZE), dtype=torch.uint8)
    return MicroscaledWeights(_codes(num_out, num_in), exponents)


_FORMS: dict[str, Callable[[int, int], GroupedWeights | Fp4Weights]] = {
    "Q4_K": lambda num_out, num_in: _superblocks(num_out, num_in, 32, 4),
    "Q5_K": lambda num_out, num_in: _superblocks(num_out, num_in, 32, 5),
    "Q6_K": lambda num_out, num_in: _superblocks(num_out, num_in, 16, 6),
    "Q8_0": lambda num_out, num_in: _groups(num_out, num_in, 32, 8),
    "int4, groups of 128": lambda num_out, num_in: _groups(num_out, num_in, 128, 4),
    "NVFP4": _nvfp4,
    "MXFP4": _mxfp4,
}
_FLOATS = ("NVFP4", "MXFP4")
"""Forms that `--quantization int8` rounds to int8 with a scale per row, like other weights."""


def run(settings: Settings) -> Outcome:
    """Measures every form at every number of rows, alternating."""
    shape = SHAPES["tiny" if settings.quick else settings.options.shape]
    num_in, num_out = 256 * math.ceil(shape.hidden_size / 256), 2 * shape.intermediate_size
    set_num_threads(settings.threads)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    names = [*dtypes, *_FORMS, *(form + _INT8_INPUTS for form in _FORMS if form not in _FLOATS)]
    results, raw = [], {}
    for num_rows in _ROWS[:1] if settings.quick else _ROWS:
        settings.progress(f"{num_rows} rows, layers of {num_in} x {num_out}")
        variants, num_bytes = {}, {}
        for name in names:
            ops = CpuOps(quantization="int8" if name.endswith(_INT8_INPUTS) else None, num_threads=settings.threads)
            if name in dtypes:
                layer = ops.pack_linear(torch.rand(num_out, num_in, dtype=dtypes[name]), None)
                size = layer.weight.nbytes
            else:
                weights = _FORMS[name.removesuffix(_INT8_INPUTS)](num_out, num_in)
                if isinstance(weights, GroupedWeights):
                    layer = ops.pack_grouped(weights, None, torch.float32)
                else:
                    layer = ops.pack_fp4(weights, None, torch.float32)
                size = layer.weight.nbytes + layer.scales.nbytes + (0 if layer.codes is None else layer.codes.nbytes)
            num_layers = 2 if settings.quick else math.ceil(_BYTES / size)
            layers = [_copy(layer) for _ in range(num_layers)]
            x = torch.rand(num_rows, num_in)
            variants[name] = seconds_of([_replay(ops, x, layers)], settings.threads)
            num_bytes[name] = size, num_layers
        samples = alternate(variants, rounds=settings.rounds, progress=settings.progress)
        raw[str(num_rows)] = {"seconds": samples.raw, "bytes": num_bytes}
        for name in names:
            size, num_layers = num_bytes[name]
            seconds = {each: samples.best(each) / num_bytes[each][1] for each in (name, "bf16", "fp32")}
            note = f"over fp32: {seconds['fp32'] / seconds[name]:.2f}x; {size / seconds[name] / 1e9:.1f} GB/s, "
            note += f"{2 * num_rows * num_in * num_out / seconds[name] / 1e9:,.0f} GOP/s"
            goal = 1.0 if name not in dtypes and (num_rows == 1 or name.endswith(_INT8_INPUTS)) else None
            what = f"{name}, {num_rows} rows, {8 * size / (num_in * num_out):.2f} bits: over bf16"
            results.append(Result("grouped-linear", what, seconds["bf16"] / seconds[name], "x", goal=goal, note=note))
    return Outcome(tuple(results), raw)


def _replay(ops: CpuOps, x: torch.Tensor, layers: Sequence[PackedLinear]) -> Callable[[], object]:
    return ops.replayable(lambda: [ops.linear(x, layer) for layer in layers])


def _copy(layer: PackedLinear) -> PackedLinear:
    """Returns the same weights in other memory."""
    codes = None if layer.codes is None else layer.codes.clone()
    return replace(layer, weight=layer.weight.clone(), scales=layer.scales.clone(), codes=codes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="0.6B", help="model shape that defines the layers (default: 0.6B)"
    )
