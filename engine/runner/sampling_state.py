"""Sampling parameters of the requests in the batch, as columns for the sampler."""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.core.request import SamplingParams
from engine.runner.step_buffers import Array, StepSections
from kernels.sampling import DOUBLES, FILTERS, PENALTIES, SamplingBatch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class Biases(NamedTuple):
    """Token ids and the values added to their logits, [n] int32 and float32."""

    ids: Int32Array
    values: npt.NDArray[np.float32]


class Columns(NamedTuple):
    """Host-side summary of the columns that `SamplingState.fill` wrote.

    Attributes:
        version: version of the state at that time.
        rows: [S], state rows that sample.
        num_prompt_tokens, min_tokens: [S], of these rows.
        top_logprobs: [S], number of alternatives per row; -1: no logprobs.
        max_top_logprobs: the largest of them.
        max_min_tokens: the largest of min_tokens.
        any_biased: whether a row has logit biases.
        any_penalised: whether a row has a penalty and needs its history.
        any_random: whether a row has temperature > 0.
        any_filtered: whether such a row has top_k, top_p or min_p.
    """

    version: int
    rows: Int64Array
    num_prompt_tokens: Int32Array
    min_tokens: Int64Array
    top_logprobs: Int32Array
    max_top_logprobs: int
    max_min_tokens: int
    any_biased: bool
    any_penalised: bool
    any_random: bool
    any_filtered: bool


_NO_BIASES = Biases(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))

_BIASED, _PENALISED, _RANDOM, _FILTERED = 1, 2, 4, 8  # flags of a row

_doubles_of = attrgetter(*DOUBLES)
_penalties_of, _NO_PENALTIES = attrgetter(*PENALTIES), tuple(PENALTIES.values())
_filters_of, _NO_FILTERS = attrgetter(*FILTERS), tuple(FILTERS.values())

_PLAIN = np.array(list(DOUBLES.values()))[:, None]  # values of a greedy row


class SamplingState:
    """One row of sampling parameters per row of `engine.runner.request_state.RequestState`.

    Attributes:
        version: changes whenever a row does.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self.version = 0
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._doubles = np.zeros((len(DOUBLES), max_num_seqs))
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._ints = np.zeros((2, max_num_seqs), dtype=np.int32)
        self._top_k, self._top_logprobs = self._ints  # views
        self._prompt_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self._flags = np.zeros(max_num_seqs, dtype=np.uint8)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._bias = [_NO_BIASES] * max_num_seqs
        self._stop_ids = [_NO_BIASES.ids] * max_num_seqs
        self._minus_inf = np.full(vocab_size, -np.inf, dtype=np.float32)

    def set_rows(self, rows: Sequence[int], all_params: Sequence[SamplingParams]) -> None:
        """Sets the parameters of the requests in these rows."""
        self.version += 1
        self._doubles[:, rows] = np.array([_doubles_of(params) for params in all_params]).T
        self._top_k[rows] = [min(params.top_k, self._vocab_size) for params in all_params]
        self._top_logprobs[rows] = [-1 if params.top_logprobs is None else params.top_logprobs for params in all_params]
        self._prompt_logprobs[rows] = [params.prompt_logprobs or 0 for params in all_params]
        self._flags[rows] = [self._flags_of(params) for params in all_params]
        self._seed[rows] = [
            params.seed if params.seed < 2**63 else params.seed - 2**64  # the same 64 bits
            for params in all_params
        ]
        self._min_tokens[rows] = [params.min_tokens for params in all_params]
        for row, params in zip(rows, all_params, strict=True):
            self._bias[row] = _NO_BIASES
            if params.logit_bias:
                ids, values = zip(*params.logit_bias, strict=True)
                self._bias[row] = Biases(np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32))
            if params.min_tokens:
                ends = set(params.stop_token_ids) | (set() if params.ignore_end_token else self._end_token_ids)
                self._stop_ids[row] = np.array(sorted(i for i in ends if i < self._vocab_size), dtype=np.int32)

    def _flags_of(self, params: SamplingParams) -> int:
        flags = _BIASED if params.logit_bias else 0
        if _penalties_of(params) != _NO_PENALTIES:
            flags |= _PENALISED
        if params.temperature > 0:
            is_filtered = 0 < params.top_k < self._vocab_size or _filters_of(params) != _NO_FILTERS
            flags |= _RANDOM | _FILTERED if is_filtered else _RANDOM
        return flags

    def is_penalised(self, row: int) -> bool:
        """Whether the sampler needs the history of this row."""
        return bool(self._flags[row] & _PENALISED)

    def fill(self, rows: Int64Array, num_prompt_tokens: Int32Array, out: StepSections[Array]) -> Columns:
        """Writes the parameters that are constant between steps; once for the same rows, version and buffer.

        Args:
            rows: [S], state rows that sample.
            num_prompt_tokens: [S], of these rows.
            out: buffer to write to.
        """
        num_rows = len(rows)
        longs, ints = out.longs, out.ints
        out.doubles[:, :num_rows] = self._doubles[:, rows]
        longs[0, :num_rows] = self._seed[rows]
        longs[2, :num_rows] = rows
        ints[:2, :num_rows] = self._ints[:, rows]
        ints[2, :num_rows] = rows
        ints[3, :num_rows] = num_prompt_tokens
        top_logprobs = self._top_logprobs[rows]
        min_tokens = self._min_tokens[rows]
        flags = int(np.bitwise_or.reduce(self._flags[rows]))
        return Columns(
            self.version,
            rows,
            num_prompt_tokens,
            min_tokens,
            top_logprobs,
            int(top_logprobs.max(initial=-1)),
            int(min_tokens.max(initial=0)),
            any_biased=bool(flags & _BIASED),
            any_penalised=bool(flags & _PENALISED),
            any_random=bool(flags & _RANDOM),
            any_filtered=bool(flags & _FILTERED),
        )

    def fill_forced(self, rows: Int64Array, own: slice, out: StepSections[Array]) -> Int32Array:
        """Writes the parameters of prompt rows, which are forced to a token: no penalties, biases or sampling.

        Args:
            rows: [F], state rows.
            own: their slice of the sampler's rows; the rows before it have been written.
            out: buffer to write to.
        Returns: [F], number of alternatives per row.
        """
        out.doubles[:, own] = _PLAIN
        out.longs[:, own] = 0
        out.ints[:, own] = 0
        top_logprobs = out.ints[1, own] = self._prompt_logprobs[rows]
        out.bias_start[own.start + 1 : own.stop + 1] = out.bias_start[own.start]
        return top_logprobs

    def advance(self, columns: Columns, num_tokens: Int32Array, out: StepSections[Array]) -> Biases:
        """Writes the parameters that change in every step.

        Args:
            columns: result of `fill` for `out`.
            num_tokens: [S], of the same rows, including tokens in flight.
            out: gets positions, and the biases if all of them fit.
        Returns: biases of all rows, with -inf for end tokens of outputs shorter than min_tokens.
        """
        num_rows = len(columns.rows)
        position = num_tokens - columns.num_prompt_tokens
        out.longs[1, :num_rows] = position
        out.ints[4, :num_rows] = num_tokens
        out.bias_start[: num_rows + 1] = 0
        too_short = position < columns.min_tokens if columns.max_min_tokens else None
        if not columns.any_biased and (too_short is None or not too_short.any()):
            return _NO_BIASES
        biases = self._gather_biases(columns.rows, too_short, out.bias_start)
        if len(biases.ids) <= len(out.bias_ids):
            out.bias_ids[: len(biases.ids)] = biases.ids
            out.bias_values[: len(biases.ids)] = biases.values
        return biases

    def _gather_biases(self, rows: Int64Array, too_short: npt.NDArray[np.bool_] | None, start: Array) -> Biases:
        """Concatenates the biases of all rows, with -inf for end tokens where `too_short`; `start` gets offsets."""
        ids, values = [], []
        for i, row in enumerate(rows):
            bias = self._bias[row]
            forbidden = self._stop_ids[row] if too_short is not None and too_short[i] else _NO_BIASES.ids
            ids += [bias.ids, forbidden]
            values += [bias.values, self._minus_inf[: len(forbidden)]]
            start[i + 1] = start[i] + len(bias.ids) + len(forbidden)
        return Biases(np.concatenate(ids), np.concatenate(values))


def sampling_batch(
    columns: Columns,
    sections: StepSections[torch.Tensor],
    history: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    *,
    num_forced: int = 0,
    max_top_logprobs: int = -1,
) -> SamplingBatch:
    """Returns the sampler's input as views of the buffer.

    Args:
        columns: summary of S rows.
        sections: the buffer, as tensors.
        history: [max_num_seqs, max_model_len] int32, token ids by state row; valid for penalised rows only.
        bias_ids, bias_values: [num_biases], of all rows.
        num_forced: additional rows written by `SamplingState.fill_forced`.
        max_top_logprobs: largest number of alternatives of these.
    """
    num_rows = len(columns.rows) + num_forced
    doubles: dict[str, Any] = dict(zip(DOUBLES, sections.doubles[:, :num_rows].unbind(), strict=True))
    seed, position, _ = sections.longs[:, :num_rows].unbind()
    top_k, top_logprobs, history_row, num_prompt_tokens, num_tokens = sections.ints[:, :num_rows].unbind()
    return SamplingBatch(
        **doubles,
        top_k=top_k,
        seed=seed,
        position=position,
        top_logprobs=top_logprobs,
        max_top_logprobs=max(columns.max_top_logprobs, max_top_logprobs),
        history=history,
        history_row=history_row,
        num_prompt_tokens=num_prompt_tokens,
        num_tokens=num_tokens,
        bias_start=sections.bias_start[: num_rows + 1],
        bias_ids=bias_ids,
        bias_values=bias_values,
        any_penalised=columns.any_penalised,
        any_random=columns.any_random,
        any_filtered=columns.any_filtered,
        forced_ids=sections.forced_ids[:num_rows] if num_forced else None,
    )
