"""Views of the device's buffers with the shape of a step.

Consecutive steps mostly have the same shape, so the last views are cached: making them takes 5 us for the model and 10
us for the sampler on one core of an AMD EPYC, beside 45 us for the rest of a step of one row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.runner.sampling_state import Columns, sampling_batch
from engine.runner.step_buffers import StepSections
from kernels.metadata import GroupBlocks
from kernels.sampling import SamplingBatch


class StepTensors(NamedTuple):
    """Views for steps of one shape."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    state_slots: torch.Tensor | None
    groups: tuple[GroupBlocks, ...]
    logits_indices: torch.Tensor


class StepViews:
    """Views of one set of buffers; they show the current content."""

    def __init__(
        self,
        sections: StepSections[torch.Tensor],
        sampling_sections: StepSections[torch.Tensor],
        groups: Sequence[GroupBlocks],
    ) -> None:
        """Takes the device's buffers.

        Args:
            sections: the model's.
            sampling_sections: the sampler's, usually the same.
            groups: of each cache group, block table [max_num_seqs, max_blocks] and slots [tokens].
        """
        self._sections = sections
        self._sampling_sections = sampling_sections
        self._groups = groups
        self._last_step: tuple[object, StepTensors] | None = None
        self._last_unbiased: tuple[object, SamplingBatch] | None = None

    def step(self, num_tokens: int, num_rows: int, num_samples: int) -> StepTensors:
        """Returns the views for a step of these numbers of tokens, rows (both with padding) and samples."""
        key = num_tokens, num_rows, num_samples
        if self._last_step is None or self._last_step[0] != key:
            sections = self._sections
            tensors = StepTensors(
                input_ids=sections.input_ids[:num_tokens],
                positions=sections.positions[:num_tokens],
                query_start_loc=sections.query_start_loc[: num_rows + 1],
                seq_lens=sections.seq_lens[:num_rows],
                state_slots=sections.state_slots[:num_rows] if len(sections.state_slots) else None,
                groups=tuple(
                    GroupBlocks(table[:num_rows], slot_mapping[:num_tokens]) for table, slot_mapping in self._groups
                ),
                logits_indices=sections.logits_indices[:num_samples],
            )
            self._last_step = key, tensors
        return self._last_step[1]

    def unbiased(self, columns: Columns, history: torch.Tensor) -> SamplingBatch:
        """Returns the `sampling_batch` of rows without biases, whose views depend only on their number."""
        hints = columns.max_top_logprobs, columns.any_penalised, columns.any_random, columns.any_filtered
        key = len(columns.rows), id(history), hints
        if self._last_unbiased is None or self._last_unbiased[0] != key:
            sections = self._sampling_sections
            nothing = sections.bias_ids[:0], sections.bias_values[:0]
            self._last_unbiased = key, sampling_batch(columns, sections, history, *nothing)
        return self._last_unbiased[1]
