"""Compares the kernels that a model uses with `kernels.reference`, on the device and in the forms that it uses.

A kernel that is compiled wrongly, or runs on a faulty device, may serve fluent nonsense. This takes about a second and
finds errors of a few rounding steps, at small sizes: it does not replace the tests.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple, cast

import torch

from kernels.dtypes import dtype_name
from kernels.interface import AdapterOps, ExpertChoice, KernelOps, KVCache, LowRank
from kernels.kv_cache import PagedKVCache
from kernels.metadata import AdaptedTokens, AttentionMetadata
from kernels.model_forms import ALLOWED, ExpertForms, ModelForms
from kernels.sample_weights import grouped, microscaled, nvfp4
from kernels.sampling import SamplingBatch, TokenMasks, greedy_batch
from kernels.scale_groups import FP8_BLOCK_SIZE, MXFP4_GROUP_SIZE, NVFP4_GROUP_SIZE

_Outputs = Sequence[torch.Tensor]

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
    run: Callable[[KernelOps, torch.dtype], _Outputs]


class Mismatch(NamedTuple):
    """A kernel whose result is wrong."""

    kernel: str
    reason: str


def kernel_cases(forms: ModelForms, device: torch.device) -> list[KernelCase]:
    """Returns every kernel in the forms of a model, with fixed random inputs."""
    inputs = _Inputs(forms, device)
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


class _Inputs:
    """Makes random inputs on the device, the same in every process."""

    def __init__(self, forms: ModelForms, device: torch.device) -> None:
        self.device = device
        self._dtype, self._weights_dtype = forms.dtype, forms.weights_dtype
        self._generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> torch.Tensor:
        """Returns values of unit scale in the dtype of the model."""
        return torch.randn(shape, generator=self._generator).to(self.device, self._dtype)

    def weights(self, *shape: int) -> torch.Tensor:
        """Returns weights of unit scale, as they are stored."""
        return self.random(*shape).to(self._weights_dtype)

    def order(self, number: int) -> list[int]:
        """Returns a random order of numbers from 0."""
        return torch.randperm(number, generator=self._generator).tolist()

    def int32(self, numbers: Sequence[int]) -> torch.Tensor:
        """Returns integers."""
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def int64(self, numbers: Sequence[int]) -> torch.Tensor:
        """Returns integers."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)


def _pointwise_cases(forms: ModelForms, inputs: _Inputs) -> Iterator[KernelCase]:
    dtype, allowed = dtype_name(forms.dtype), ALLOWED[forms.dtype]
    x, residual = (inputs.random(_NUM_TOKENS, forms.hidden_size) for _ in range(2))
    table, weight = inputs.weights(_NUM_TOKENS, forms.hidden_size), inputs.weights(forms.hidden_size)
    form = f"{dtype}, {forms.hidden_size} wide"
    stored = f"{dtype_name(forms.weights_dtype)}, {forms.hidden_size} wide"
    indices = inputs.int64([_NUM_TOKENS - 1, 0, 5])
    yield KernelCase("gather_rows", form, allowed, lambda ops, _: (ops.gather_rows(x, indices),))

    def gathered(ops: KernelOps, _: torch.dtype) -> _Outputs:
        return (ops.gather_rows(ops.pack_tied(table, forms.weights_dtype)[0], indices),)

    yield KernelCase("gather_rows", f"{stored}, tied", allowed, gathered)
    if forms.weights_dtype is not forms.dtype:
        yield KernelCase("gather_rows", stored, allowed, lambda ops, _: (ops.gather_rows(table, indices),))
    yield KernelCase("rms_norm", form, allowed, lambda ops, _: (ops.rms_norm(x, weight, forms.eps),))
    if forms.has_projection_norms:
        num_q, num_k = forms.num_heads * forms.head_dim, forms.num_kv_heads * forms.head_dim
        qkv, key_norm = inputs.random(_NUM_TOKENS, num_q + 2 * num_k), inputs.weights(num_k)

        def normed(ops: KernelOps, _: torch.dtype) -> _Outputs:
            out = qkv.clone()
            ops.norm_columns(out, num_q, key_norm, forms.eps)
            return (out,)

        yield KernelCase("norm_columns", f"{dtype}, {num_k} of {qkv.shape[1]}", allowed, normed)
    yield KernelCase(
        "add_rms_norm", form, allowed, lambda ops, _: ops.add_rms_norm(x, residual.clone(), weight, forms.eps)
    )


def _linear_cases(forms: ModelForms, inputs: _Inputs) -> Iterator[KernelCase]:
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

    def normed(ops: KernelOps, _: torch.dtype) -> _Outputs:
        row, weights = ops.rms_norm(x[:1], norm, forms.eps, for_linear=True), packed(ops, wide, bias)
        rows, _residual = ops.add_rms_norm(x, residual.clone(), norm, forms.eps, for_linear=True)
        return ops.linear(row, weights), ops.linear(rows, weights)

    def gated(ops: KernelOps, _: torch.dtype) -> _Outputs:
        return (ops.linear(getattr(ops, forms.gate)(gate_up), packed(ops, narrow, None)),)

    def head(ops: KernelOps, _: torch.dtype) -> _Outputs:
        return (ops.linear(x, ops.pack_linear(wide, None, for_logits=True)),)

    form = f"{dtype_name(forms.dtype)}, weights {forms.weights_form or dtype_name(forms.weights_dtype)}"
    if forms.multiplies_in_bf16:
        form += ", products in bfloat16"
    yield KernelCase("linear after rms_norm", f"{form}, {forms.hidden_size} wide", forms.linear_error, normed)
    yield KernelCase(f"linear after {forms.gate}", f"{form}, {forms.intermediate_size} wide", forms.linear_error, gated)
    if forms.experts is not None:
        yield _mixture_case(forms, forms.experts, inputs, packed, form)
    yield KernelCase("linear of the output head", form, forms.linear_error, head)


def _mixture_case(
    forms: ModelForms,
    experts: ExpertForms,
    inputs: _Inputs,
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

    def run(ops: KernelOps, _: torch.dtype) -> _Outputs:
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


def _attention_cases(forms: ModelForms, inputs: _Inputs) -> Iterator[KernelCase]:
    """The write to the cache, and attention over it: one-token rows, prompt chunks and both in a batch."""
    heads = f"{forms.num_heads} heads over {forms.num_kv_heads} of {forms.head_dim}"
    form = f"{dtype_name(forms.dtype)}, cache {dtype_name(forms.kv_dtype)}, {heads}, blocks of {forms.block_size}"
    if forms.has_sinks:
        form += ", sinks"
    decode = _CachedRows(forms, inputs, query_lens=(1, 1, 1), seq_lens=(1, 17, 520))
    mixed = _CachedRows(forms, inputs, query_lens=(1, 7, 40), seq_lens=(33, 7, 130))
    yield KernelCase("rotate_and_store", form, forms.cache_error, decode.store)
    for window, soft_cap in product(forms.sliding_windows, forms.attention_soft_caps):
        windowed = form if window is None else f"{form}, window {window}"
        capped = windowed if soft_cap is None else f"{windowed}, soft cap {soft_cap:g}"
        for kind, rows in (("decode", decode), ("prefill and decode", mixed)):
            attend = partial(rows.attend, sliding_window=window, soft_cap=soft_cap)
            yield KernelCase("paged_attention", f"{kind}, {capped}", forms.cache_error, attend)


def _adapter_cases(forms: ModelForms, inputs: _Inputs) -> Iterator[KernelCase]:
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

    def run(ops: KernelOps, _: torch.dtype) -> _Outputs:
        out, adapter_ops = y.clone(), cast("AdapterOps", ops)
        adapted = AdaptedTokens(inputs.int64([token for _, token in chosen]), inputs.int64([own for own, _ in chosen]))
        adapter_ops.add_adapters(out, x, adapter_ops.pack_adapters(adapters), adapted)
        return (out,)

    yield KernelCase("add_adapters", f"{dtype_name(forms.dtype)}, {size} wide", ALLOWED[forms.dtype], run)


def _soft_cap_cases(forms: ModelForms, inputs: _Inputs) -> Iterator[KernelCase]:
    soft_cap = forms.logit_soft_cap
    if soft_cap is None:
        return
    logits = soft_cap * inputs.random(_NUM_TOKENS, forms.vocab_size).float()

    def run(ops: KernelOps, _: torch.dtype) -> _Outputs:
        return (ops.soft_cap(logits.clone(), soft_cap),)

    yield KernelCase("soft_cap", f"{soft_cap:g}, vocabulary of {forms.vocab_size}", ALLOWED[torch.float32], run)


class _CachedRows:
    """Rows whose keys and values are written to a cache, and the last tokens of which attend."""

    def __init__(
        self, forms: ModelForms, inputs: _Inputs, *, query_lens: Sequence[int], seq_lens: Sequence[int]
    ) -> None:
        self._forms = forms
        blocks_per_row = [-(-seq_len // forms.block_size) for seq_len in seq_lens]
        self._num_blocks = sum(blocks_per_row) + 1
        free = inputs.order(self._num_blocks)
        tables = [[free.pop() for _ in range(number)] for number in blocks_per_row]
        slots = [
            table[position // forms.block_size] * forms.block_size + position % forms.block_size
            for table, seq_len in zip(tables, seq_lens, strict=True)
            for position in range(seq_len)
        ]
        ends = torch.tensor(seq_lens).cumsum(0).tolist()
        queries = [token for end, number in zip(ends, query_lens, strict=True) for token in range(end - number, end)]
        width = (forms.num_heads + 2 * forms.num_kv_heads) * forms.head_dim
        self._qkv = inputs.random(len(slots), width)
        self._positions = inputs.int64([position for seq_len in seq_lens for position in range(seq_len)])
        frequencies = 10_000.0 ** -torch.linspace(0, 1, forms.head_dim // 2)
        angles = (torch.arange(max(seq_lens))[:, None] * frequencies).to(inputs.device)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._norms = None
        if forms.has_head_norms:
            self._norms = inputs.weights(forms.head_dim), inputs.weights(forms.head_dim)
        self._sinks = inputs.random(forms.num_heads).float() if forms.has_sinks else None
        self._slots, self._queries = inputs.int64(slots), inputs.int64(queries)
        width_of_table = max(blocks_per_row)
        self._metadata = AttentionMetadata(
            query_start_loc=inputs.int32([0, *torch.tensor(query_lens).cumsum(0).tolist()]),
            seq_lens=inputs.int32(seq_lens),
            block_table=torch.stack([inputs.int32(table + [0] * (width_of_table - len(table))) for table in tables]),
            slot_mapping=self._slots[self._queries],
            block_size=forms.block_size,
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
            num_one_token_reqs=next((row for row, number in enumerate(query_lens) if number > 1), len(query_lens)),
        )

    def store(self, ops: KernelOps, kv_dtype: torch.dtype) -> _Outputs:
        """Returns rotated queries, and the keys and values in the cache."""
        q, cache = self._stored(ops, kv_dtype)
        if isinstance(cache, PagedKVCache):
            return q, *cache.read_slots(self._slots)
        return q, *(part.flatten(0, 1)[self._slots].float() for part in cache)

    def attend(
        self, ops: KernelOps, kv_dtype: torch.dtype, *, sliding_window: int | None, soft_cap: float | None
    ) -> _Outputs:
        """Returns the attention of the last tokens of each row."""
        q, cache = self._stored(ops, kv_dtype)
        scale = self._forms.head_dim**-0.5
        queries, step = q[self._queries].contiguous(), replace(self._metadata)  # without what other calls have derived
        attend = partial(ops.paged_attention, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        return (attend(queries, cache, step, sinks=self._sinks),)

    def _stored(self, ops: KernelOps, kv_dtype: torch.dtype) -> tuple[torch.Tensor, KVCache]:
        forms = self._forms
        cache = ops.make_kv_cache(self._num_blocks, forms.block_size, forms.num_kv_heads, forms.head_dim, kv_dtype)
        q = ops.rotate_and_store(
            self._qkv.clone(),
            self._positions,
            self._cos,
            self._sin,
            cache,
            self._slots,
            head_norms=self._norms,
            eps=forms.eps,
        )
        return q, cache


def _sampler_case(forms: ModelForms, inputs: _Inputs) -> KernelCase:
    logits = 3 * inputs.random(6, forms.vocab_size).float()
    batch = _sampling_batch(inputs, forms.vocab_size)

    def run(ops: KernelOps, _: torch.dtype) -> _Outputs:
        sampled = ops.sample(logits.clone(), batch)
        return sampled.token_ids, sampled.status, sampled.top_ids, sampled.logprobs, sampled.top_values

    return KernelCase("sample", f"vocabulary of {forms.vocab_size}", ALLOWED[torch.float32], run)


def _sampling_batch(inputs: _Inputs, vocab_size: int) -> SamplingBatch:
    """Greedy, random, filtered, penalised, masked and forced rows; all report log-probabilities."""

    def column(numbers: Sequence[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float64, device=inputs.device)

    num_rows = 6
    words = torch.full((1, -(-vocab_size // 32)), 0x55555555, dtype=torch.int32, device=inputs.device)
    return replace(
        greedy_batch(num_rows, inputs.device),
        temperature=column([0, 1, 0.7, 0.8, 1, 0]),
        top_k=inputs.int32([0, 0, 5, 0, 0, 0]),
        top_p=column([1, 1, 0.9, 0.5, 1, 1]),
        min_p=column([0, 0, 0, 0.01, 0, 0]),
        repetition_penalty=column([1, 1, 1, 1.2, 1, 1]),
        presence_penalty=column([0, 0, 0, 0.5, 0, 0]),
        frequency_penalty=column([0, 0, 0, 0.25, 0, 0]),
        seed=inputs.int64(range(num_rows)),
        top_logprobs=inputs.int32([2] * num_rows),
        max_top_logprobs=2,
        history=inputs.int32([number % vocab_size for number in range(9)]).repeat(num_rows, 1),
        history_row=inputs.int32(range(num_rows)),
        num_prompt_tokens=inputs.int32([4] * num_rows),
        num_tokens=inputs.int32([9] * num_rows),
        masks=TokenMasks(inputs.int32([-1, -1, -1, -1, 0, -1]), words),
        forced_ids=inputs.int32([-1, -1, -1, -1, -1, min(3, vocab_size - 1)]),
    )
