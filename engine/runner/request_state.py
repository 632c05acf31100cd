"""What the runner remembers of each request between steps: one row of persistent arrays per request that holds blocks.

The plan brings differences only; a step gathers its inputs from these arrays without a Python loop over tokens.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from engine.core.outputs import NewRequest, SchedulerOutput
from engine.core.request import RequestId
from engine.runner.sampling_state import SamplingState

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class RequestState:
    """Rows of request state. A request keeps its row from admission to removal.

    Invariants: every known request has one row and no row has two; of a row num_tokens tokens and
    num_blocks block ids are known.

    Attributes:
        token_ids: [max_num_seqs, max_model_len], prompt and output.
        num_tokens, num_prompt_tokens, num_blocks: [max_num_seqs].
        block_table: [max_num_seqs, max_blocks].
        sampling: how each row samples.
    """

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, sampling: SamplingState) -> None:
        # zeros() of this size is lazily committed: rows and positions never used cost no memory
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.block_table: Int32Array = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.sampling = sampling
        self._row_of: dict[RequestId, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutput) -> None:
        """Takes over a plan's differences: removed requests, then new ones, then blocks for rows."""
        for request_id in plan.removed_request_ids:
            self._free_rows.append(self._row_of.pop(request_id))
        for request in plan.new_requests:
            self._add(request)
        for row in plan.rows:
            if row.new_block_ids:
                self._append_blocks(self._row_of[row.request_id], row.new_block_ids)

    def rows_of(self, request_ids: Iterable[RequestId]) -> Int64Array:
        """The state row of each request."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), dtype=np.int64)

    def append_tokens(self, rows: Int64Array, token_ids: Int64Array) -> None:
        """Adds one sampled token to each of these rows."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def check_integrity(self) -> None:
        """Asserts the invariants of the class."""
        rows = [*self._row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(len(self.num_tokens))), "a row is lost or has two owners"

    def _add(self, request: NewRequest) -> None:
        assert request.request_id not in self._row_of, f"request {request.request_id} is known already"
        row = self._free_rows.pop()
        self._row_of[request.request_id] = row
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = len(request.token_ids)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)
        self.sampling.set_row(row, request.params)

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        start = self.num_blocks[row]
        self.block_table[row, start : start + len(block_ids)] = block_ids
        self.num_blocks[row] = start + len(block_ids)
