"""From a plan to the tensors of one ragged batch: all tokens concatenated, no padding."""

from dataclasses import dataclass

import numpy as np
import torch

from engine.core.outputs import SchedulerOutput
from engine.runner.request_state import Int64Array, RequestState
from kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. The tensors are views of persistent buffers: valid until the next batch is built.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        metadata: how the tokens divide into rows and where their KV lies.
        sampling_rows: [S], rows of the plan that sample.
        state_rows: [S], their rows in `RequestState`.
        logits_indices: [S] int64, their last tokens in the batch.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    sampling_rows: Int64Array
    state_rows: Int64Array
    logits_indices: torch.Tensor


class BatchBuilder:
    """Packs batches into buffers allocated once."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._input_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._positions = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._slot_mapping = torch.zeros(max_num_batched_tokens, dtype=torch.int64)
        self._query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        # flat, so that a table of any width is contiguous
        self._block_table = torch.zeros(max_num_seqs * -(-max_model_len // block_size), dtype=torch.int32)

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
        block_table = self._block_table[: num_rows * width].view(num_rows, width)
        block_table.numpy()[:] = state.block_table[rows, :width]

        sampling_rows = np.flatnonzero(samples)
        return Batch(
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
            sampling_rows=sampling_rows,
            state_rows=rows[sampling_rows],
            logits_indices=torch.from_numpy(query_start_loc.numpy()[sampling_rows + 1].astype(np.int64) - 1),
        )
