"""Inputs and outputs of the sampler as tensors, and the rules that every implementation follows.

A row of logits becomes a token in these steps, with the same bits in any batch:

1. Penalties. The logit of a token seen in prompt or output is divided by `repetition_penalty` if positive, else
   multiplied by it (CTRL, arXiv:1909.05858). For tokens in the output, `frequency_penalty` times the count and
   `presence_penalty` once are subtracted. Then biases are added; -inf forbids a token. Sums are taken in fp64 and
   rounded to fp32 once. Last, a mask forbids every token whose bit is clear; a row with BAD_LOGITS fails despite it.
2. temperature 0 takes the largest logit. Otherwise d = (logit - largest logit) / temperature, in fp64.
3. Filters, each on the result of the previous one. All keep the first tokens of the same order: largest logit first,
   equal logits by lowest id. min_p keeps d >= log(min_p); top_k keeps the first k; top_p keeps a token if the
   probability of those before it, renormalised over the input of this filter, is below top_p. The first token is
   always kept.
4. Gumbel-max (arXiv:1411.0030): the token with the largest d - log(-log(u)) wins, u = (r + 1/2) / 2^32 with r = word
   (id mod 4) of Philox4x32-10(key = seed, counter = (id div 4, position, 0, 0)). Noise that belongs to the token and
   not to its rank or to the batch makes the draw insensitive to rounding: logits that move by 1e-6 change about one
   token in a million, and a token that enters or leaves the kept set changes the draw only if it wins.

A row with a forced token becomes that token instead of steps 2 to 4; it fails under the same conditions as others.

Log-probabilities are raw: computed from the logits before step 1, at temperature 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class RowStatus(IntEnum):
    """Result of sampling a row."""

    OK = 0
    BAD_LOGITS = 1
    """NaN or +inf among the logits, or overflow in step 1."""
    NO_CANDIDATE = 2
    """Every token is forbidden, or has a logit of -inf."""


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens rows may draw.

    Attributes:
        rows: [S] int32, index of this row's mask, which rows may share; -1: any token may be drawn.
        words: [num_masks, >= ceil(vocab_size / 32)] int32, its rows contiguous; bit i % 32 of word i // 32 is set if
            token i may be drawn. Bits beyond the vocabulary are ignored.
    """

    rows: torch.Tensor
    words: torch.Tensor


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample S rows of logits; row i of each tensor belongs to row i of the logits.

    Attributes:
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty: [S] float64.
        top_k: [S] int32, 0 keeps all.
        seed: [S] int64, the bits of an unsigned seed.
        position: [S] int64, index in the output of the token to draw.
        top_logprobs: [S] int32, alternatives to report; -1 reports no log-probabilities.
        max_top_logprobs: the largest of them, known on the host; -1 if no row asks.
        history: [num_histories, max_len] int32, token ids of prompt and output.
        history_row, num_prompt_tokens, num_tokens: [S] int32, where in `history` this row's tokens are: the first
            num_prompt_tokens of num_tokens are prompt.
        bias_start: [S + 1] int32; row i owns entries bias_start[i]:bias_start[i + 1] of the next two.
        bias_ids, bias_values: [num_biases] int32 and float32.
        any_penalised, any_random, any_filtered: host knowledge that lets an implementation skip work; True is always
            valid. any_penalised may be False only if every row has repetition_penalty 1,
            presence_penalty 0 and frequency_penalty 0 (then `history` is not read); any_random only if every
            temperature is 0; any_filtered only if no row with a temperature above 0 has top_k in 1..vocab_size - 1 or
            top_p below 1. Empty `bias_ids` means that no row has a bias.
        masks: None: every row may draw any token.
        forced_ids: [S] int32, the token that a row becomes, -1 where it is drawn; None: all are drawn.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    top_logprobs: torch.Tensor
    max_top_logprobs: int
    history: torch.Tensor
    history_row: torch.Tensor
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor
    bias_start: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    any_penalised: bool = True
    any_random: bool = True
    any_filtered: bool = True
    masks: TokenMasks | None = None
    forced_ids: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "SamplingBatch":
        """Returns the batch with its tensors on a device."""
        masks = None
        if self.masks is not None:
            masks = TokenMasks(self.masks.rows.to(device), self.masks.words.to(device))
        return replace(self, **_tensors_on(device, self), masks=masks)


FILTERS: Mapping[str, float] = {"top_p": 1.0, "min_p": 0.0}
"""Filters that are float64 columns, and the value with which each keeps every token; top_k is an int32 column."""

PENALTIES: Mapping[str, float] = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Penalties, all float64 columns, and the value with which each changes nothing."""

DOUBLES: Mapping[str, float] = {"temperature": 0.0, **FILTERS, **PENALTIES}
"""All float64 columns, with the values of a greedy row."""


def greedy_batch(num_rows: int, device: torch.device | str = "cpu", **others: Any) -> SamplingBatch:
    """Makes a batch of greedy rows without history and biases.

    Args:
        num_rows: S.
        device: of every tensor.
        others: fields that differ.
    """

    def column(dtype: torch.dtype, value: float = 0) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=device)

    int32, int64 = torch.int32, torch.int64
    columns: dict[str, Any] = {name: column(torch.float64, value) for name, value in DOUBLES.items()}
    columns |= {name: column(int32) for name in ("top_k", "history_row", "num_prompt_tokens", "num_tokens")}
    columns |= {
        "seed": column(int64),
        "position": column(int64),
        "top_logprobs": column(int32, -1),
        "max_top_logprobs": -1,
        "history": torch.zeros(num_rows, 1, dtype=int32, device=device),
        "bias_start": torch.zeros(num_rows + 1, dtype=int32, device=device),
        "bias_ids": torch.zeros(0, dtype=int32, device=device),
        "bias_values": torch.zeros(0, dtype=torch.float32, device=device),
    }
    return SamplingBatch(**columns | others)


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Results of S rows of logits.

    Attributes:
        token_ids: [S] int64, -1 where `status` is not OK.
        status: [S] int8, values of `RowStatus`.
        logprobs: [S] float64, of the chosen tokens; NaN for rows that did not ask or failed.
        top_ids, top_values: [S, max(0, max_top_logprobs)] int64 and float64, best first, equal ones by lowest id; rows
            that asked for fewer, or whose vocabulary is smaller, leave the rest -1 and NaN.
    """

    token_ids: torch.Tensor
    status: torch.Tensor
    logprobs: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def to(self, device: torch.device | str) -> "SampledTokens":
        """Returns the results on a device."""
        return replace(self, **_tensors_on(device, self))

    @classmethod
    def undecided(cls, num_rows: int, max_top_logprobs: int) -> "SampledTokens":
        """Allocates results on the CPU: status OK, and -1 or NaN everywhere else."""
        width = max(0, max_top_logprobs)
        arrays = (
            np.full(num_rows, -1, dtype=np.int64),
            np.zeros(num_rows, dtype=np.int8),
            np.full(num_rows, np.nan),
            np.full((num_rows, width), -1, dtype=np.int64),
            np.full((num_rows, width), np.nan),
        )
        return cls(*map(torch.from_numpy, arrays))


def _tensors_on(device: torch.device | str, batch: SamplingBatch | SampledTokens) -> dict[str, Any]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)}
