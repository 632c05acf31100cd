"""From a plan to the tensors of one ragged batch: all tokens concatenated, no padding."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.core.outputs import SchedulerOutput
from engine.runner.request_state import Int64Array, RequestState
from kernels.metadata import AttentionMetadata, StepInputs


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. The tensors are views of persistent buffers: valid until the next batch is built.

    Attributes:
        inputs: what the model reads; logits are wanted of the S last tokens of the rows that sample.
        sampling_rows: [S], rows of the plan that sample.
        state_rows: [S], their rows in `RequestState`.
    """

    inputs: StepInputs
    sampling_rows: Int64Array
    state_rows: Int64Array


class BatchBuilder:
    """Packs batches into buffers allocated once."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._block_table = torch.zeros(max_num_seqs, -(-max_model_len // block_size), dtype=torch.int32)
        self._logits_indices = torch.zeros(max_num_seqs, dtype=torch.int64)

    def largest(self) -> StepInputs:
        """The buffers whole."""
        return StepInputs(
            input_ids=self._input_ids,
            positions=self._positions,
            metadata=AttentionMetadata(
                query_start_loc=self._query_start_loc,
                seq_lens=self._seq_lens,
                block_table=self._block_table,
                slot_mapping=self._slot_mapping,
                block_size=self._block_size,
                max_query_len=self._input_ids.shape[0],
                max_seq_len=self._block_table.shape[1] * self._block_size,
            ),
            logits_indices=self._logits_indices,
        )

    def build(self, plan: SchedulerOutput, state: RequestState) -> Batch:
        """Packs the rows of a plan, which has at least one and whose differences `state` has taken over."""
        request_ids, scheduled, computed, _, samples = zip(*plan.rows, strict=True)
        rows = state.rows_of(request_ids)
        query_lens = np.array(scheduled, dtype=np.int64)
        starts = np.array(computed, dtype=np.int64)
        num_rows, num_tokens = len(rows), plan.num_tokens

        query_start_loc = self._query_start_loc[: num_rows + 1]
        np.cumsum(query_lens, out=query_start_loc.numpy()[1:])
        seq_lens = self._seq_lens[:num_rows]
        seq_lens.numpy()[:] = starts + query_lens
        max_seq_len = int(seq_lens.numpy().max())

        if num_tokens == num_rows:  # decodes only
            token_rows, token_positions = rows, starts
        else:
            token_rows = np.repeat(rows, query_lens)
            first_tokens = query_start_loc.numpy()[:-1]
            token_positions = np.arange(num_tokens) + np.repeat(starts - first_tokens, query_lens)
        input_ids = self._input_ids[:num_tokens]
        input_ids.numpy()[:] = state.token_ids[token_rows, token_positions]
        positions = self._positions[:num_tokens]
        positions.numpy()[:] = token_positions
        blocks, offsets = np.divmod(token_positions, self._block_size)
        slot_mapping = self._slot_mapping[:num_tokens]
        slot_mapping.numpy()[:] = state.block_table[token_rows, blocks].astype(np.int64) * self._block_size + offsets

        width = -(-max_seq_len // self._block_size)
        block_table = self._block_table[:num_rows]
        block_table.numpy()[:, :width] = state.block_table[rows, :width]

        sampling_rows = np.flatnonzero(samples)
        logits_indices = self._logits_indices[: len(sampling_rows)]
        logits_indices.numpy()[:] = query_start_loc.numpy()[sampling_rows + 1] - 1
        return Batch(
            inputs=StepInputs(
                input_ids=input_ids,
                positions=positions,
                metadata=AttentionMetadata(
                    query_start_loc=query_start_loc,
                    seq_lens=seq_lens,
                    block_table=block_table,
                    slot_mapping=slot_mapping,
                    block_size=self._block_size,
                    max_query_len=int(query_lens.max()),
                    max_seq_len=max_seq_len,
                ),
                logits_indices=logits_indices,
            ),
            sampling_rows=sampling_rows,
            state_rows=rows[sampling_rows],
        )
