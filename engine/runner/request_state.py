"""What the runner remembers of each request between steps: one row of persistent arrays per request that holds blocks.

The plan brings differences only; a step gathers its inputs from these arrays without a Python loop over tokens.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.core.outputs import NewRequest, SchedulerOutput
from engine.core.request import RequestId
from engine.runner.sampling_state import Int32Array, Int64Array, SamplingState


class Landing(NamedTuple):
    """Where the tokens of a step in flight will be written.

    Attributes:
        rows: [S], state rows that sample.
        positions: [S], index of the new token.
        plan_index: of the step, counted by `RequestState.apply`.
    """

    rows: Int64Array
    positions: Int32Array
    plan_index: int


class RequestState:
    """Rows of request state. A request keeps its row from admission to removal.

    A token that a step in flight will yield counts as a token of its row. Until it is known, `token_ids` holds
    -1 - row in its place, from which the device finds out which token is meant: the last one sampled for that row.

    Invariants: every known request has one row and no row has two; of a row num_tokens tokens and
    num_blocks block ids are known or in flight; a step in flight writes to a row only as long as the request that it
    was launched for has it.

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
        self._num_plans = 0
        self._vacated: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)  # the plan that took the row from a request
        self._num_landings = 0  # awaited
        self._row_of: dict[RequestId, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutput) -> None:
        """Takes over a plan's differences: removed requests, then new ones, then blocks for rows."""
        self._num_plans += 1
        for request_id in plan.removed_request_ids:
            row = self._row_of.pop(request_id)
            self._vacated[row] = self._num_plans
            self._free_rows.append(row)
        for request in plan.new_requests:
            self._add(request)
        for row_plan in plan.rows:
            if row_plan.new_block_ids:
                self._append_blocks(self._row_of[row_plan.request_id], row_plan.new_block_ids)

    def rows_of(self, request_ids: Iterable[RequestId]) -> Int64Array:
        """The state row of each request."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), dtype=np.int64)

    @property
    def has_tokens_in_flight(self) -> bool:
        """Whether `token_ids` may hold a reference instead of a token."""
        return self._num_landings > 0

    def await_tokens(self, rows: Int64Array) -> Landing:
        """Counts one token more for each of these rows, which a step in flight will yield."""
        positions = self.num_tokens[rows]
        self.token_ids[rows, positions] = -1 - rows
        self.num_tokens[rows] = positions + 1
        self._num_landings += 1
        return Landing(rows, positions, self._num_plans)

    def land_tokens(self, landing: Landing, token_ids: Int64Array) -> None:
        """Writes the tokens of a step to the rows that still belong to the requests they were sampled for.

        Args:
            landing: where they were expected.
            token_ids: [S]; -1 for a row that failed: it has no token and will be removed.
        """
        self._num_landings -= 1
        rows, positions = landing.rows, landing.positions
        lands = token_ids >= 0
        if landing.plan_index < self._num_plans:
            lands &= self._vacated[rows] <= landing.plan_index
        if not lands.all():
            rows, positions, token_ids = rows[lands], positions[lands], token_ids[lands]
        self.token_ids[rows, positions] = token_ids

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
