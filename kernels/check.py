"""Compares the kernels that a model uses with `kernels.reference`, on the device and in the forms that it uses.

A kernel that is compiled wrongly, or runs on a faulty device, may serve fluent nonsense. This takes about a second and
finds errors of a few rounding steps, at small sizes: it does not replace the tests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple, cast

import torch

from kernels.check_inputs import CachedRows, CheckInputs, DeltaRows, Outputs, sampling_batch
from kernels.dtypes import dtype_name
from kernels.interface import AdapterOps, ExpertChoice, KernelOps, LowRank, pack_adapters
from kernels.metadata import AdaptedTokens
from kernels.model_forms import ALLOWED, ExpertForms, ModelForms
from kernels.sample_weights import grouped, microscaled, nvfp4
from kernels.scale_groups import FP8_BLOCK_SIZE, MXFP4_GROUP_SIZE, NVFP4_GROUP_SIZE

_NUM_TOKENS = 33
_NUM_OUT = 256
_MAX_EXPERTS = 4


class KernelCase(NamedTuple):
    """One kernel in one form.

    Attributes:
        kernel: the operation.
        form: what distinguishes it from other forms.
        allowed: largest error.
        run: computes the outputs with operations and a dtype of the cache.
    """

    kernel: str
    form: str
    allowed: float
    run: Callable[[KernelOps, torch.dtype], Outputs]


class Mismatch(NamedTuple):
    """A kernel whose result is wrong."""

    kernel: str
    reason: str


def kernel_cases(forms: ModelForms, device: torch.device) -> list[KernelCase]:
    """Returns every kernel in the forms of a model, with fixed random inputs."""
    inputs = CheckInputs(forms, device)
    return [
        *_pointwise_cases(forms, inputs),
        *_linear_cases(forms, inputs),
        *_attention_cases(forms, inputs),
        *_adapter_cases(forms, inputs),
        *_soft_cap_cases(forms, inputs),
        _sampler_case(forms, inputs),
    ]


@torch.inference_mode()
def run_cases(ops: KernelOps, forms: ModelForms, cases: Sequence[KernelCase]) -> None:
    """Runs the cases without a comparison, to compile their kernels."""
    for case in cases:
        case.run(ops, forms.kv_dtype)


@torch.inference_mode()
def find_mismatches(
    ops: KernelOps, reference: KernelOps, forms: ModelForms, cases: Sequence[KernelCase]
) -> list[Mismatch]:
    """Compares each case with the reference on the same device.

    Returns: kernels with a larger error than allowed, or that raise a RuntimeError or ValueError.
    """
    mismatches = []
    for case in cases:
        expected = case.run(reference, forms.dtype)
        try:
            actual = case.run(ops, forms.kv_dtype)
            error = max(_error(a, e) for a, e in zip(actual, expected, strict=True))
        except (RuntimeError, ValueError) as exception:
            mismatches.append(Mismatch(case.kernel, f"{case.kernel} ({case.form}) fails: {_first_line(exception)}"))
            continue
        if not error <= case.allowed:
            reason = f"has an error of {error:.2g}, {case.allowed:.2g} is allowed"
            mismatches.append(Mismatch(case.kernel, f"{case.kernel} ({case.form}) {reason}"))
    return mismatches


def _first_line(exception: Exception) -> str:
    return (str(exception).splitlines() or [type(exception).__name__])[0]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error in a row relative to the row's root mean square; of integers, how many differ."""
    if not expected.is_floating_point():
        return float((actual != expected).sum())
    actual, expected = actual.double(), expected.double()
    scale = expected.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    error = float(((actual - expected).abs() / scale).max())
    return math.inf if math.isnan(error) else error


def _pointwise_cases(forms: ModelForms, inputs: CheckInputs) -> Iterator[KernelCase]:
    dtype, allowed = dtype_name(forms.dtype), ALLOWED[forms.dtype]
    x, residual = (inputs.random(_NUM_TOKENS, forms.hidden_size) for _ in range(2))
    table, weight = inputs.weights(_NUM_TOKENS, forms.hidden_size), inputs.weights(forms.hidden_size)
    form = f"{dtype}, {forms.hidden_size} wide"
    stored = f"{dtype_name(forms.weights_dtype)}, {forms.hidden_size} wide"
    indices = inputs.int64([_NUM_TOKENS - 1, 0, 5])
    yield KernelCase("gather_rows", form, allowed, lambda ops, _: (ops.gather_rows(x, indices),))

    def gathered(ops: KernelOps, _: torch.dtype) -> Outputs:
        return (ops.gather_rows(ops.pack_tied(table, forms.weights_dtype)[0], indices),)

    yield KernelCase("gather_rows", f"{stored}, tied", allowed, gathered)
    if forms.weights_dtype is not forms.dtype:
        yield KernelCase("gather_rows", stored, allowed, lambda ops, _: (ops.gather_rows(table, indices),))
    yield KernelCase("rms_norm", form, allowed, lambda ops, _: (ops.rms_norm(x, weight, forms.eps),))
    if forms.has_projection_norms:
        num_q, num_k = forms.num_heads * forms.head_dim, forms.num_kv_heads * forms.head_dim
        qkv, key_norm = inputs.random(_NUM_TOKENS, num_q + 2 * num_k), inputs.weights(num_k)

        def normed(ops: KernelOps, _: torch.dtype) -> Outputs:
            out = qkv.clone()
            ops.norm_columns(out, num_q, key_norm, forms.eps)
            return (out,)

        yield KernelCase("norm_columns", f"{dtype}, {num_k} of {qkv.shape[1]}", allowed, normed)
    yield KernelCase(
        "add_rms_norm", form, allowed, lambda ops, _: ops.add_rms_norm(x, residual.clone(), weight, forms.eps)
    )


def _linear_cases(forms: ModelForms, inputs: CheckInputs) -> Iterator[KernelCase]:
    """Linear layers, each behind the kernel that makes its input, which quantises it for 8-bit layers."""
    x, residual = (inputs.random(_NUM_TOKENS, forms.hidden_size) for _ in range(2))
    gate_up = inputs.random(_NUM_TOKENS, 2 * forms.intermediate_size)
    norm, bias = inputs.weights(forms.hidden_size), inputs.weights(_NUM_OUT) if forms.has_bias else None
    wide, narrow = (inputs.weights(_NUM_OUT, size) for size in (forms.hidden_size, forms.intermediate_size))

    def packed(ops: KernelOps, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        if forms.weights_form == "fp8 checkpoint":
            scales = torch.linspace(0.5, 1.5, len(weight), device=inputs.device)
            return ops.pack_quantized(weight.to(torch.float8_e4m3fn), scales, bias, forms.weights_dtype)
        if forms.weights_form == "fp8 blocks" and not any(size % FP8_BLOCK_SIZE for size in weight.shape):
            shape = (weight.shape[0] // FP8_BLOCK_SIZE, weight.shape[1] // FP8_BLOCK_SIZE)
            block_scales = torch.linspace(0.5, 1.5, shape[0] * shape[1], device=inputs.device).view(shape)
            return ops.pack_quantized(weight.to(torch.float8_e4m3fn), block_scales, bias, forms.weights_dtype)
        if forms.weights_form == "mxfp4 groups" and weight.shape[1] % MXFP4_GROUP_SIZE == 0:
            return ops.pack_fp4(microscaled(weight), bias, forms.dtype)
        if forms.weights_form == "nvfp4 groups" and weight.shape[1] % NVFP4_GROUP_SIZE == 0:
            return ops.pack_fp4(nvfp4(weight), bias, forms.dtype)  # the reference rounds to it
        if (form := forms.weights_form or "").startswith("int") and form.endswith(" groups"):
            num_bits = int(form.removesuffix(" groups")[-1])
            return ops.pack_grouped(grouped(weight, num_bits), bias, forms.dtype)
        return ops.pack_linear(weight, bias)

    def normed(ops: KernelOps, _: torch.dtype) -> Outputs:
        row, weights = ops.rms_norm(x[:1], norm, forms.eps, for_linear=True), packed(ops, wide, bias)
        rows, _residual = ops.add_rms_norm(x, residual.clone(), norm, forms.eps, for_linear=True)
        return ops.linear(row, weights), ops.linear(rows, weights)

    def gated(ops: KernelOps, _: torch.dtype) -> Outputs:
        return (ops.linear(ops.gate_and_mul(gate_up, forms.gate), packed(ops, narrow, None)),)

    def head(ops: KernelOps, _: torch.dtype) -> Outputs:
        return (ops.linear(x, ops.pack_linear(wide, None, for_logits=True)),)

    form = f"{dtype_name(forms.dtype)}, weights {forms.weights_form or dtype_name(forms.weights_dtype)}"
    if forms.multiplies_in_bf16:
        form += ", products in bfloat16"
    yield KernelCase("linear after rms_norm", f"{form}, {forms.hidden_size} wide", forms.linear_error, normed)
    yield KernelCase(f"linear after {forms.gate}", f"{form}, {forms.intermediate_size} wide", forms.linear_error, gated)
    if forms.experts is not None:
        yield _mixture_case(forms, forms.experts, inputs, packed, form)
        if forms.experts.has_shared:
            yield _shared_case(forms, inputs)
    yield from _state_cases(forms, inputs, packed, form)
    yield KernelCase("linear of the output head", form, forms.linear_error, head)


def _mixture_case(
    forms: ModelForms,
    experts: ExpertForms,
    inputs: CheckInputs,
    packed: Callable[[KernelOps, torch.Tensor, torch.Tensor | None], object],
    form: str,
) -> KernelCase:
    """Some experts, which the router or the caller chooses; more of them differ in nothing.

    The router chooses by the first inputs, far from a tie.
    """
    number, hidden, inner = min(experts.num_experts, _MAX_EXPERTS), forms.hidden_size, experts.inner_size
    routing = experts.routing._replace(top_k=min(experts.routing.top_k, number))
    x, router = inputs.random(_NUM_TOKENS, hidden), torch.eye(number, hidden).to(inputs.weights(1))
    for token in x:
        token[:number] = torch.tensor(inputs.order(number)).to(token)
    gate_up = [inputs.weights(2 * inner, hidden) * hidden**-0.5 for _ in range(number)]
    down = [inputs.weights(hidden, inner) for _ in range(number)]
    # the same of all experts, so that it changes no choice
    router_bias = torch.ones(number).to(inputs.weights(1)) if experts.has_bias else None
    biases = [inputs.weights(size) if experts.has_bias else None for size in (2 * inner, hidden)]
    choice = None
    if not experts.has_router:
        factors = inputs.random(_NUM_TOKENS, routing.top_k).float()
        choice = ExpertChoice(x[:, :number].topk(routing.top_k).indices, factors)

    def packed_expert(ops: KernelOps, weight: torch.Tensor, bias: torch.Tensor | None) -> object:
        if experts.is_microscaled and weight.shape[1] % MXFP4_GROUP_SIZE == 0:
            return ops.pack_microscaled(microscaled(weight), bias, forms.weights_dtype)
        return packed(ops, weight, bias)

    def run(ops: KernelOps, _: torch.dtype) -> Outputs:
        first, second = (
            [packed_expert(ops, weight, bias) for weight in weights]
            for weights, bias in zip((gate_up, down), biases, strict=True)
        )
        if choice is not None:
            return (ops.mix_chosen_experts(x, ops.pack_experts(None, first, second, routing), choice),)
        return (ops.mix_experts(x, ops.pack_experts(router, first, second, routing, router_bias)),)

    what = f"{form}, {routing.top_k} of {number} experts of {inner}, {hidden} wide"
    what += f"{', biases' if experts.has_bias else ''}{', MXFP4' if experts.is_microscaled else ''}"
    what += "" if experts.has_router else ", chosen by the caller"
    return KernelCase("mixture of experts", what, forms.linear_error, run)


def _shared_case(forms: ModelForms, inputs: CheckInputs) -> KernelCase:
    """The sum of a mixture and of the expert that all tokens share."""
    size = forms.hidden_size
    mixed, shared, x = (inputs.random(_NUM_TOKENS, size) for _ in range(3))
    gate = inputs.random(1, size)[0].float() * size**-0.5

    def run(ops: KernelOps, _: torch.dtype) -> Outputs:
        return (ops.add_shared(mixed.clone(), shared, x, gate),)

    return KernelCase("add_shared", f"{dtype_name(forms.dtype)}, {size} wide", ALLOWED[forms.dtype], run)


def _attention_cases(forms: ModelForms, inputs: CheckInputs) -> Iterator[KernelCase]:
    """The write to the cache, and attention over it: one-token rows, prompt chunks and both in a batch."""
    heads = f"{forms.num_heads} heads over {forms.num_kv_heads} of {forms.head_dim}"
    form = f"{dtype_name(forms.dtype)}, cache {dtype_name(forms.kv_dtype)}, {heads}, blocks of {forms.block_size}"
    if forms.value_dim is not None:
        form += f", latents of {forms.value_dim}"
    if forms.has_sinks:
        form += ", sinks"
    decode = CachedRows(forms, inputs, query_lens=(1, 1, 1), seq_lens=(1, 17, 520))
    mixed = CachedRows(forms, inputs, query_lens=(1, 7, 40), seq_lens=(33, 7, 130))
    yield KernelCase("rotate_and_store", form, forms.cache_error, decode.store)
    for window, soft_cap in product(forms.sliding_windows, forms.attention_soft_caps):
        windowed = form if window is None else f"{form}, window {window}"
        capped = windowed if soft_cap is None else f"{windowed}, soft cap {soft_cap:g}"
        for kind, rows in (("decode", decode), ("prefill and decode", mixed)):
            attend = partial(rows.attend, sliding_window=window, soft_cap=soft_cap)
            yield KernelCase("paged_attention", f"{kind}, {capped}", forms.cache_error, attend)


def _state_cases(
    forms: ModelForms,
    inputs: CheckInputs,
    packed: Callable[[KernelOps, torch.Tensor, torch.Tensor | None], object],
    form: str,
) -> Iterator[KernelCase]:
    """The gated delta rule and the gate of attention, each before a linear layer."""
    heads = forms.delta_heads
    if heads is not None:
        rows, weight = DeltaRows(heads, forms, inputs), inputs.weights(_NUM_OUT, heads.value_size)

        def delta_rule(ops: KernelOps, _: torch.dtype) -> Outputs:
            out, states = rows.run(ops)
            return ops.linear(out, packed(ops, weight, None)), states.conv, states.recurrent.flatten(2)

        sizes = f"{heads.num_value_heads} heads over {heads.num_key_heads} of {heads.key_dim} x {heads.value_dim}"
        yield KernelCase("linear after delta_rule", f"{form}, {sizes}", forms.linear_error, delta_rule)
    if forms.has_attention_gate:
        size = forms.num_heads * forms.head_dim
        x, wide = inputs.random(_NUM_TOKENS, size), inputs.random(_NUM_TOKENS, size + 16)
        narrow = inputs.weights(_NUM_OUT, size)

        def gated(ops: KernelOps, _: torch.dtype) -> Outputs:
            return (ops.linear(ops.gate_columns(x.clone(), wide[:, 16:]), packed(ops, narrow, None)),)

        yield KernelCase("linear after gate_columns", f"{form}, {size} wide", forms.linear_error, gated)


def _adapter_cases(forms: ModelForms, inputs: CheckInputs) -> Iterator[KernelCase]:
    """Adapters of one change, none, and two in different rows; tokens with each of them and without."""
    if not forms.has_adapters:
        return
    half, size = _NUM_OUT // 2, forms.hidden_size
    x, y = inputs.random(_NUM_TOKENS, size), inputs.random(_NUM_TOKENS, _NUM_OUT)

    def change(rank: int, first_row: int) -> LowRank:
        a, b = inputs.random(rank, size).float() * size**-0.5, inputs.random(half, rank).float() * rank**-0.5
        return LowRank(a, b, first_row)

    adapters = [[change(8, half)], [], [change(24, 0), change(24, half)]]
    tokens = sorted((number % 5, number) for number in inputs.order(_NUM_TOKENS))
    chosen = [(adapter, token) for adapter, token in tokens if adapter < len(adapters)]

    def run(ops: KernelOps, _: torch.dtype) -> Outputs:
        out, adapter_ops = y.clone(), cast("AdapterOps", ops)
        adapted = AdaptedTokens(inputs.int64([token for _, token in chosen]), inputs.int64([own for own, _ in chosen]))
        adapter_ops.add_adapters(out, x, pack_adapters(adapter_ops, adapters), adapted)
        return (out,)

    yield KernelCase("add_adapters", f"{dtype_name(forms.dtype)}, {size} wide", ALLOWED[forms.dtype], run)


def _soft_cap_cases(forms: ModelForms, inputs: CheckInputs) -> Iterator[KernelCase]:
    soft_cap = forms.logit_soft_cap
    if soft_cap is None:
        return
    logits = soft_cap * inputs.random(_NUM_TOKENS, forms.vocab_size).float()

    def run(ops: KernelOps, _: torch.dtype) -> Outputs:
        return (ops.soft_cap(logits.clone(), soft_cap),)

    yield KernelCase("soft_cap", f"{soft_cap:g}, vocabulary of {forms.vocab_size}", ALLOWED[torch.float32], run)


def _sampler_case(forms: ModelForms, inputs: CheckInputs) -> KernelCase:
    logits = 3 * inputs.random(6, forms.vocab_size).float()
    batch = sampling_batch(inputs, forms.vocab_size)

    def run(ops: KernelOps, _: torch.dtype) -> Outputs:
        sampled = ops.sample(logits.clone(), batch)
        return sampled.token_ids, sampled.status, sampled.top_ids, sampled.logprobs, sampled.top_values

    return KernelCase("sample", f"vocabulary of {forms.vocab_size}", ALLOWED[torch.float32], run)
