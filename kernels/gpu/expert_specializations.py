"""Calls of mixtures of experts that together compile all their kernels; see `kernels.gpu.specializations`."""

import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.dtypes import dtype_name
from kernels.fp8_block import BLOCK
from kernels.gpu.experts import ExpertLinear, PackedExperts, mix_experts
from kernels.gpu.gate import clamped_gate, silu_and_mul
from kernels.gpu.linear import PackedLinear
from kernels.gpu.row_specializations import Call
from kernels.gpu.targets import Target
from kernels.interface import ClampedGate, Routing

_META = torch.device("meta")


class _Shape(NamedTuple):
    """Sizes of a mixture; the experts of a rank have a part of their inner units."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


_QWEN3_30B = _Shape(128, 8, 2048, 768)
_MIXTRAL_RANK = _Shape(8, 2, 4096, 3584)
_GPT_OSS_20B = _Shape(32, 4, 2880, 2880)
_UNEVEN = _Shape(60, 4, 1000, 96)


def expert_calls(target: Target, everything: bool) -> Iterator[Call]:
    """Yields mixtures by numbers of weights and sizes; a call compiles all tiles."""
    half = torch.bfloat16 if target.has_bfloat16 else torch.float16
    for dtype in dict.fromkeys((half, torch.float16, torch.float32) if everything else (half,)):
        for shape in (_QWEN3_30B, _MIXTRAL_RANK, _UNEVEN) if everything else (_QWEN3_30B, _UNEVEN):
            yield _call(3, shape, dtype, None, target)
        for form in (None, "MXFP4"):
            yield _call(3, _GPT_OSS_20B, dtype, form, target, gate=ClampedGate(1.702, 7.0), has_bias=True)
        for form in ("scales per block", "scales per channel"):
            if form == "scales per block" or target.fp8_dtype is not None:
                yield _call(3, _QWEN3_30B, dtype, form, target)


def live_expert_calls(target: Target, generator: random.Random) -> Iterator[Call]:
    """Yields the same mixtures with random numbers of tokens."""
    half = torch.bfloat16 if target.has_bfloat16 else torch.float16
    for num_tokens in (1, 16, 256, 257, 1025, 8192, *(generator.randint(1, 20000) for _ in range(8))):
        yield _call(num_tokens, _QWEN3_30B, half, None, target)
        yield _call(num_tokens, _QWEN3_30B, half, "scales per block", target)
        yield _call(num_tokens, _GPT_OSS_20B, half, "MXFP4", target, gate=ClampedGate(1.702, 7.0), has_bias=True)


def _call(
    num_tokens: int,
    shape: _Shape,
    dtype: torch.dtype,
    form: str | None,
    target: Target,
    *,
    gate: ClampedGate | None = None,
    has_bias: bool = False,
) -> Call:
    def layer(num_out: int, num_in: int) -> ExpertLinear:
        weights_dtype = dtype if form is None else target.fp8_dtype or torch.uint8
        weight = torch.empty(shape.num_experts, num_out, num_in, dtype=weights_dtype, device=_META)
        bias = torch.empty(shape.num_experts, num_out, dtype=dtype, device=_META) if has_bias else None
        if form is None:
            return ExpertLinear(weight, None, dtype, num_in, bias)
        if form == "MXFP4":
            codes = torch.empty(shape.num_experts, num_out, num_in // 2, dtype=torch.uint8, device=_META)
            exponents = torch.empty(shape.num_experts, num_in // 32, num_out, dtype=torch.uint8, device=_META)
            return ExpertLinear(codes, exponents, dtype, num_in, bias)
        sizes = (num_out // BLOCK, num_in // BLOCK) if form == "scales per block" else (num_out,)
        return ExpertLinear(weight, torch.empty(shape.num_experts, *sizes, device=_META), dtype, num_in, bias)

    def router(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return torch.empty(len(x), packed.out_features, dtype=packed.dtype, device=_META)

    x = torch.empty(num_tokens, shape.hidden, dtype=dtype, device=_META)
    routing = Routing(shape.top_k, normalizes=True, gate=gate or "silu_and_mul")
    experts = PackedExperts(
        PackedLinear(torch.empty(shape.num_experts, shape.hidden, dtype=dtype, device=_META), None, None, dtype),
        layer(2 * shape.inner, shape.hidden),
        layer(shape.hidden, shape.inner),
        routing,
    )
    label = f"{dtype_name(dtype)}{'' if form is None else f', {form}'}, {shape.num_experts} experts of {shape.inner}"
    between = silu_and_mul if gate is None else partial(clamped_gate, gate=gate)
    make = partial(mix_experts, x, experts, linear=router, gate=between, target=target, batch_invariant=False)
    return Call(label, make)
