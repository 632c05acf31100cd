"""Calls of mixtures of experts that together compile all their kernels; see `kernels.gpu.specializations`."""

import random
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.dtypes import dtype_name
from kernels.gates import ClampedGate, Gate
from kernels.gpu.experts import ExpertLinear, PackedExperts, mix_chosen_experts, mix_experts
from kernels.gpu.gate import gate_and_mul
from kernels.gpu.grouped_experts import ExpertGroups
from kernels.gpu.grouped_linear import grouped_span
from kernels.gpu.linear import PackedLinear
from kernels.gpu.row_specializations import Call, model_dtypes
from kernels.gpu.targets import Target
from kernels.interface import ExpertChoice, Routing
from kernels.scale_groups import FP8_BLOCK_SIZE

_META = torch.device("meta")


class _Shape(NamedTuple):
    """Sizes of a mixture; the experts of a rank have a part of their inner units."""

    num_experts: int
    top_k: int
    hidden: int
    inner: int


class _GroupedForm(NamedTuple):
    """Integers in groups."""

    num_bits: int
    group_size: int
    has_orders: bool = False

    def __str__(self) -> str:
        orders = ", orders of inputs" if self.has_orders else ""
        return f"{self.num_bits} bits in groups of {self.group_size}{orders}"


_GROUPED_FORMS = (
    _GroupedForm(4, 128),
    _GroupedForm(4, 32, has_orders=True),
    _GroupedForm(8, 128),
    _GroupedForm(4, 32),
    *(_GroupedForm(bits, size) for bits in (4, 8) for size in (64, 16)),
    _GroupedForm(8, 32),
    _GroupedForm(8, 128, has_orders=True),
)

_QWEN3_30B = _Shape(128, 8, 2048, 768)
_MIXTRAL_RANK = _Shape(8, 2, 4096, 3584)
_GPT_OSS_20B = _Shape(32, 4, 2880, 2880)
_UNEVEN = _Shape(60, 4, 1000, 96)


def expert_calls(target: Target, everything: bool) -> Iterator[Call]:
    """Yields mixtures by numbers of weights and sizes, and one that the caller chooses; a call compiles all tiles."""
    for dtype in model_dtypes(target, everything):
        for shape in (_QWEN3_30B, _MIXTRAL_RANK, _UNEVEN) if everything else (_QWEN3_30B, _UNEVEN):
            yield _call(3, shape, dtype, None, target)
        yield _call(3, _UNEVEN, dtype, None, target, is_chosen=True)
        for form in (None, "MXFP4"):
            yield _call(3, _GPT_OSS_20B, dtype, form, target, gate=ClampedGate(1.702, 7.0), has_bias=True)
        for groups in _GROUPED_FORMS if everything else _GROUPED_FORMS[:3]:
            yield _call(3, _QWEN3_30B, dtype, groups, target)
        yield _call(3, _MIXTRAL_RANK, dtype, _GroupedForm(4, 128), target)
        for form in ("scales per block", "scales per channel"):
            if form == "scales per block" or target.fp8_dtype is not None:
                yield _call(3, _QWEN3_30B, dtype, form, target)


def live_expert_calls(target: Target, generator: random.Random) -> Iterator[Call]:
    """Yields the same mixtures with random numbers of tokens."""
    half = target.half_dtype
    for num_tokens in (1, 16, 256, 257, 1025, 8192, *(generator.randint(1, 20000) for _ in range(8))):
        yield _call(num_tokens, _QWEN3_30B, half, None, target)
        yield _call(num_tokens, _UNEVEN, half, None, target, is_chosen=True)
        yield _call(num_tokens, _QWEN3_30B, half, "scales per block", target)
        yield _call(num_tokens, _QWEN3_30B, half, _GROUPED_FORMS[0], target)
        yield _call(num_tokens, _GPT_OSS_20B, half, "MXFP4", target, gate=ClampedGate(1.702, 7.0), has_bias=True)


def _call(
    num_tokens: int,
    shape: _Shape,
    dtype: torch.dtype,
    form: str | _GroupedForm | None,
    target: Target,
    *,
    gate: Gate = "silu_and_mul",
    has_bias: bool = False,
    is_chosen: bool = False,
) -> Call:
    def grouped(form: _GroupedForm, num_out: int, num_in: int) -> ExpertLinear:
        span = grouped_span(num_in, form.group_size, form.num_bits)
        assert span is not None, "no such groups are listed"
        num_bytes = num_in * form.num_bits // 8
        cells = torch.uint8 if form.num_bits == 4 else torch.int8
        weight = torch.empty(shape.num_experts, num_out, num_bytes, dtype=cells, device=_META)
        scales = torch.empty(shape.num_experts, num_in // form.group_size, num_out, device=_META)
        orders = torch.empty(shape.num_experts, num_in, dtype=torch.int32, device=_META) if form.has_orders else None
        groups = ExpertGroups(scales, form.num_bits, form.group_size, span, orders)
        return ExpertLinear(weight, scales, dtype, num_in, groups=groups)

    def layer(num_out: int, num_in: int) -> ExpertLinear:
        if isinstance(form, _GroupedForm):
            return grouped(form, num_out, num_in)
        weights_dtype = dtype if form is None else target.fp8_dtype or torch.uint8
        weight = torch.empty(shape.num_experts, num_out, num_in, dtype=weights_dtype, device=_META)
        bias = torch.empty(shape.num_experts, num_out, dtype=dtype, device=_META) if has_bias else None
        if form is None:
            return ExpertLinear(weight, None, dtype, num_in, bias)
        if form == "MXFP4":
            codes = torch.empty(shape.num_experts, num_out, num_in // 2, dtype=torch.uint8, device=_META)
            exponents = torch.empty(shape.num_experts, num_in // 32, num_out, dtype=torch.uint8, device=_META)
            return ExpertLinear(codes, exponents, dtype, num_in, bias)
        sizes = (num_out // FP8_BLOCK_SIZE, num_in // FP8_BLOCK_SIZE) if form == "scales per block" else (num_out,)
        return ExpertLinear(weight, torch.empty(shape.num_experts, *sizes, device=_META), dtype, num_in, bias)

    def router(x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return torch.empty(len(x), packed.out_features, dtype=packed.dtype, device=_META)

    x = torch.empty(num_tokens, shape.hidden, dtype=dtype, device=_META)
    routing = Routing(shape.top_k, normalizes=True, gate=gate)
    experts = PackedExperts(
        PackedLinear(torch.empty(shape.num_experts, shape.hidden, dtype=dtype, device=_META), None, None, dtype),
        layer(2 * shape.inner, shape.hidden),
        layer(shape.hidden, shape.inner),
        routing,
    )
    label = f"{dtype_name(dtype)}{'' if form is None else f', {form}'}, {shape.num_experts} experts of {shape.inner}"
    if is_chosen:
        sizes = num_tokens, shape.top_k
        choice = ExpertChoice(torch.empty(sizes, dtype=torch.int64, device=_META), torch.empty(sizes, device=_META))
        label, mix = f"{label}, chosen", partial(mix_chosen_experts, choice=choice)
    else:
        mix = partial(mix_experts, linear=router)
    between = partial(gate_and_mul, gate=gate)
    return Call(label, partial(mix, x, experts, gate=between, target=target, batch_invariant=False))
