"""Calls of adapters that together compile all their kernels; see `kernels.gpu.specializations`."""

import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.dtypes import dtype_name
from kernels.gpu.adapters import PackedAdapters, add_adapters
from kernels.gpu.row_specializations import Call, model_dtypes
from kernels.gpu.targets import Target
from kernels.gpu.tiles import adapter_tiles
from kernels.metadata import AdaptedTokens

_META = torch.device("meta")
_NUM_PROCESSORS = 132
_NUM_PLACES = 8


class _Layer(NamedTuple):
    """Inputs, outputs of each part, and the largest rank."""

    num_in: int
    parts: tuple[int, ...]
    rank: int


_FEW = (_Layer(4096, (4096, 1024, 1024), 16), _Layer(14336, (4096,), 64), _Layer(1037, (999,), 48))
_LAYERS = (*_FEW, _Layer(4096, (14336, 14336), 512), _Layer(576, (576, 192, 192), 32), _Layer(896, (896,), 16))


def adapter_calls(target: Target, everything: bool) -> Iterator[Call]:
    """Yields layers with adapters by dtype; a call compiles all tiles."""
    for dtype in model_dtypes(target, everything):
        for layer in _LAYERS if everything else _FEW:
            for batch_invariant in (False, True):
                yield _call(3, layer, dtype, target, batch_invariant)


def live_adapter_calls(target: Target, generator: random.Random) -> Iterator[Call]:
    """Yields the same layers with random numbers of tokens."""
    for num_tokens in (1, 16, 128, 129, 1025, 8192, *(generator.randint(1, 20000) for _ in range(8))):
        for layer in _FEW:
            yield _call(num_tokens, layer, target.half_dtype, target, False)


def _call(num_tokens: int, layer: _Layer, dtype: torch.dtype, target: Target, batch_invariant: bool) -> Call:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=_META)

    num_out, width = sum(layer.parts), adapter_tiles(target, dtype.itemsize)[0].block_n
    ends = [sum(layer.parts[: number + 1]) for number in range(len(layer.parts))]
    packed = PackedAdapters(
        empty(_NUM_PLACES, len(layer.parts) * layer.rank, layer.num_in),
        empty(_NUM_PLACES, num_out, layer.rank),
        empty(_NUM_PLACES, dtype=torch.int32),
        empty(sum(-(-part // width) for part in layer.parts), 3, dtype=torch.int32),
        tuple(zip((0, *ends), ends, strict=False)),
        layer.rank,
    )
    tokens = AdaptedTokens(*(empty(num_tokens, dtype=torch.int64) for _ in range(2)))
    x, y = empty(num_tokens, layer.num_in), empty(num_tokens, num_out)
    make = partial(
        add_adapters, y, x, packed, tokens,
        target=target, num_processors=_NUM_PROCESSORS, batch_invariant=batch_invariant,
    )  # fmt: skip
    parts = " + ".join(map(str, layer.parts))
    return Call(f"{dtype_name(dtype)}, rank {layer.rank}, {layer.num_in} inputs, {parts} outputs", make)
