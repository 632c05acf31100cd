"""Random inputs of the kernels in the forms of a model, the same in every process; for `kernels.check`."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from kernels.delta_heads import DeltaHeads
from kernels.delta_rule import DeltaStates, DeltaWeights
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.kv_cache import PagedKVCache
from kernels.metadata import AttentionMetadata
from kernels.model_forms import ModelForms
from kernels.sampling import SamplingBatch, TokenMasks, greedy_batch

Outputs = Sequence[torch.Tensor]
"""Results of an operation."""


class CheckInputs:
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


class CachedRows:
    """Rows whose keys and values are written to a cache, and the last tokens of which attend."""

    def __init__(
        self, forms: ModelForms, inputs: CheckInputs, *, query_lens: Sequence[int], seq_lens: Sequence[int]
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
        num_parts = 2 if forms.value_dim is None else 1
        width = (forms.num_heads + num_parts * forms.num_kv_heads) * forms.head_dim
        self._qkv = inputs.random(len(slots), width)
        self._positions = inputs.int64([position for seq_len in seq_lens for position in range(seq_len)])
        frequencies = 10_000.0 ** -torch.linspace(0, 1, forms.head_dim // 2)
        angles = (torch.arange(max(seq_lens))[:, None] * frequencies).to(inputs.device)
        if forms.value_dim is not None:  # latents are not rotated, and rounding would change values too
            angles = torch.zeros_like(angles)
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

    def store(self, ops: KernelOps, kv_dtype: torch.dtype) -> Outputs:
        """Returns rotated queries, and the keys and values in the cache."""
        q, cache = self._stored(ops, kv_dtype)
        if isinstance(cache, PagedKVCache):
            return q, *cache.read_slots(self._slots)
        return q, *(part.flatten(0, 1)[self._slots].float() for part in cache)

    def attend(
        self, ops: KernelOps, kv_dtype: torch.dtype, *, sliding_window: int | None, soft_cap: float | None
    ) -> Outputs:
        """Returns the attention of the last tokens of each row."""
        q, cache = self._stored(ops, kv_dtype)
        scale = self._forms.head_dim**-0.5
        queries, step = q[self._queries].contiguous(), replace(self._metadata)  # without what other calls have derived
        attend = partial(ops.paged_attention, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        return (attend(queries, cache, step, sinks=self._sinks),)

    def _stored(self, ops: KernelOps, kv_dtype: torch.dtype) -> tuple[torch.Tensor, KVCache]:
        forms = self._forms
        cache = ops.make_kv_cache(
            self._num_blocks, forms.block_size, forms.num_kv_heads, forms.head_dim, kv_dtype, forms.value_dim
        )
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


class DeltaRows:
    """Rows of layers with state: two tokens that continue requests, and the beginning and the rest of prompts."""

    _QUERY_LENS, _SEQ_LENS, _NUM_SLOTS = (1, 1, 5, 40), (9, 3, 5, 41), 5

    def __init__(self, heads: DeltaHeads, forms: ModelForms, inputs: CheckInputs) -> None:
        num_tokens = sum(self._QUERY_LENS)
        self._x = inputs.random(num_tokens, heads.num_channels + heads.value_size)
        self._gates = inputs.random(num_tokens, 2 * heads.num_value_heads)
        per_head = inputs.random(2, heads.num_value_heads).float()
        self._weights = DeltaWeights(
            heads,
            inputs.random(heads.conv_width, heads.num_channels).float(),
            per_head[0].exp(),
            per_head[1],
            inputs.random(heads.value_dim).float(),
            max(forms.eps, 1e-2),  # a head's result may be near zero: its norm would show errors many times larger
        )
        states = DeltaStates.zeros(heads, self._NUM_SLOTS, inputs.device)
        self._states = [inputs.random(*part.shape).float() for part in (states.conv, states.recurrent)]
        self._metadata = AttentionMetadata(
            query_start_loc=inputs.int32([0, *torch.tensor(self._QUERY_LENS).cumsum(0).tolist()]),
            seq_lens=inputs.int32(self._SEQ_LENS),
            block_table=inputs.int32([0] * len(self._SEQ_LENS)).view(-1, 1),
            slot_mapping=inputs.int64([-1] * num_tokens),
            state_slots=inputs.int32(inputs.order(self._NUM_SLOTS)[: len(self._SEQ_LENS)]),
            block_size=forms.block_size,
            max_query_len=max(self._QUERY_LENS),
            max_seq_len=max(self._SEQ_LENS),
            num_one_token_reqs=2,
        )

    def run(self, ops: KernelOps) -> tuple[LinearInput, DeltaStates]:
        """Returns the result, and the states after it."""
        states = DeltaStates(*(part.clone() for part in self._states))
        x, step = self._x.clone(), replace(self._metadata)  # without what other calls have derived
        return ops.delta_rule(x, self._gates.clone(), self._weights, states, step), states


def sampling_batch(inputs: CheckInputs, vocab_size: int) -> SamplingBatch:
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
