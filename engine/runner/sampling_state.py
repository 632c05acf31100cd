"""Sampling parameters of the requests in the batch as columns of numbers, ready for the sampler."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from engine.core.request import SamplingParams
from kernels.sampling import SamplingBatch


class SamplingState:
    """One row of sampling parameters per row of `engine.runner.request_state.RequestState`."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._end_token_ids = frozenset(end_token_ids)
        self._temperature, self._top_p, self._min_p = (np.zeros(max_num_seqs) for _ in range(3))
        self._repetition, self._presence, self._frequency = (np.zeros(max_num_seqs) for _ in range(3))
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._seed = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_logprobs = np.zeros(max_num_seqs, dtype=np.int32)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._has_bias = np.zeros(max_num_seqs, dtype=np.bool_)
        no_ids = np.zeros(0, dtype=np.int32)
        no_values = np.zeros(0, dtype=np.float32)
        self._no_bias = (no_ids, no_values)
        self._bias = [self._no_bias] * max_num_seqs
        self._stop_ids = [no_ids] * max_num_seqs
        self._minus_inf = np.full(vocab_size, -np.inf, dtype=np.float32)

    def set_row(self, row: int, params: SamplingParams) -> None:
        """Learns the parameters of the request in this row."""
        self._temperature[row] = params.temperature
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._repetition[row] = params.repetition_penalty
        self._presence[row] = params.presence_penalty
        self._frequency[row] = params.frequency_penalty
        self._top_k[row] = min(params.top_k, self._vocab_size)
        self._seed[row] = np.uint64(params.seed).astype(np.int64)
        self._top_logprobs[row] = -1 if params.top_logprobs is None else params.top_logprobs
        self._min_tokens[row] = params.min_tokens
        self._has_bias[row] = bool(params.logit_bias)
        self._bias[row] = self._no_bias
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias[row] = (np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32))
        if params.min_tokens:
            ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._end_token_ids)
            self._stop_ids[row] = np.array(sorted(i for i in ends if i < self._vocab_size), dtype=np.int32)

    def gather(
        self,
        rows: npt.NDArray[np.int64],
        *,
        token_ids: npt.NDArray[np.int32],
        num_tokens: npt.NDArray[np.int32],
        num_prompt_tokens: npt.NDArray[np.int32],
    ) -> SamplingBatch:
        """The sampler's view of these rows.

        Args:
            rows: [S], state rows that sample.
            token_ids: [max_num_seqs, max_model_len], token ids of all state rows.
            num_tokens, num_prompt_tokens: [S], of the rows that sample.
        """
        position = (num_tokens - num_prompt_tokens).astype(np.int64)
        top_logprobs = self._top_logprobs[rows]
        bias_start, bias_ids, bias_values = self._gather_biases(rows, position)
        tensor = torch.from_numpy
        return SamplingBatch(
            temperature=tensor(self._temperature[rows]),
            top_p=tensor(self._top_p[rows]),
            min_p=tensor(self._min_p[rows]),
            repetition_penalty=tensor(self._repetition[rows]),
            presence_penalty=tensor(self._presence[rows]),
            frequency_penalty=tensor(self._frequency[rows]),
            top_k=tensor(self._top_k[rows]),
            seed=tensor(self._seed[rows]),
            position=tensor(position),
            top_logprobs=tensor(top_logprobs),
            max_top_logprobs=int(top_logprobs.max()),
            history=tensor(token_ids),
            history_row=tensor(rows.astype(np.int32)),
            num_prompt_tokens=tensor(num_prompt_tokens),
            num_tokens=tensor(num_tokens),
            bias_start=tensor(bias_start),
            bias_ids=tensor(bias_ids),
            bias_values=tensor(bias_values),
        )

    def _gather_biases(
        self, rows: npt.NDArray[np.int64], position: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Biases of the rows, and -inf for what would end an answer that is shorter than its min_tokens."""
        start = np.zeros(len(rows) + 1, dtype=np.int32)
        too_short = position < self._min_tokens[rows]
        if not (too_short | self._has_bias[rows]).any():
            return start, *self._no_bias
        ids, values = [], []
        for i, row in enumerate(rows):
            bias_ids, bias_values = self._bias[row]
            forbidden = self._stop_ids[row] if too_short[i] else self._no_bias[0]
            ids += [bias_ids, forbidden]
            values += [bias_values, self._minus_inf[: len(forbidden)]]
            start[i + 1] = start[i] + len(bias_ids) + len(forbidden)
        return start, np.concatenate(ids), np.concatenate(values)
