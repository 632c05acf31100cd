"""State of the running requests between steps: one row of persistent arrays per request that holds blocks.

Plans contain only differences; a step gathers its inputs from these arrays without a Python loop over tokens.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.core.outputs import NewRequest, SchedulerOutput
from engine.core.request import RequestId
from engine.runner.sampling_state import Int32Array, Int64Array, SamplingState
from kernels.metadata import StateCopy


class PendingTokens(NamedTuple):
    """Where to write the tokens of a step in flight.

    Attributes:
        rows: [S], state rows that sample.
        positions: [S], index of the new token.
        plan_index: number of the plan, counted by `RequestState.apply`.
    """

    rows: Int64Array
    positions: Int32Array
    plan_index: int


class RequestState:
    """Rows of request state. A request keeps its row from admission to removal.

    A token that a step in flight will sample counts as a token of its row. Until it is known, `token_ids` holds
    -1 - row in its place, which the device replaces with the token sampled last for that row.

    Invariants: every known request has one row, and no row has two requests; the num_tokens tokens and num_blocks
    blocks of a row are known or in flight; a step in flight writes to a row only while its request owns it.

    Attributes:
        token_ids: [max_num_seqs, max_model_len], prompt and output.
        num_tokens, num_prompt_tokens, num_blocks: [max_num_seqs].
        block_table: [num_groups, max_num_seqs, max_blocks], the blocks of each cache group.
        adapters: [max_num_seqs], index of each request's adapter; -1: none.
        sampling: sampling parameters of each row.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, sampling: SamplingState, num_groups: int = 1
    ) -> None:
        # zeros() of this size is lazily committed: rows and positions never used cost no memory
        self.token_ids: Int32Array = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_table: Int32Array = np.zeros((num_groups, max_num_seqs, max_blocks), dtype=np.int32)
        self.num_blocks: Int32Array = np.zeros(max_num_seqs, dtype=np.int32)
        self.adapters: Int64Array = np.full(max_num_seqs, -1, dtype=np.int64)
        self.sampling = sampling
        self._num_plans = 0
        self._vacated: Int64Array = np.zeros(max_num_seqs, dtype=np.int64)  # the plan that freed the row
        self._num_pending_steps = 0  # steps in flight with tokens
        self._row_of: dict[RequestId, int] = {}
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: SchedulerOutput) -> None:
        """Applies the differences of a plan: removed requests, new requests, new blocks, and drafts.

        Drafts are written behind the known tokens of their row.
        """
        self._num_plans += 1
        for request_id in plan.removed_request_ids:
            row = self._row_of.pop(request_id)
            self._vacated[row] = self._num_plans
            self._free_rows.append(row)
        if plan.new_requests:
            self._add(plan.new_requests)
        for row_plan in plan.rows:
            if row_plan.new_block_ids:
                self._append_blocks(self._row_of[row_plan.request_id], row_plan.new_block_ids)
        if plan.drafts:
            for row_plan, draft in zip(plan.rows[-len(plan.drafts) :], plan.drafts, strict=True):
                row = self._row_of[row_plan.request_id]
                num_tokens = self.num_tokens[row]
                self.token_ids[row, num_tokens : num_tokens + len(draft)] = draft

    def state_copies(self, plan: SchedulerOutput) -> tuple[StateCopy, ...]:
        """Returns the copies of a plan in order; snapshots have the slots behind those of the rows."""
        first, row_of = len(self.num_tokens), self._row_of
        restored = (
            StateCopy(first + request.snapshot, row_of[request.request_id])
            for request in plan.new_requests
            if request.snapshot is not None
        )
        saved = (StateCopy(row_of[state.request_id], first + state.snapshot) for state in plan.saved_states)
        return (*restored, *saved)

    def rows_of(self, request_ids: Iterable[RequestId]) -> Int64Array:
        """Returns the state row of each request."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), dtype=np.int64)

    @property
    def has_tokens_in_flight(self) -> bool:
        """Whether `token_ids` may hold a reference instead of a token."""
        return self._num_pending_steps > 0

    def reserve_tokens(self, rows: Int64Array, num_drafts: int = 0) -> PendingTokens:
        """Reserves one token in each of these rows, which a step in flight will sample.

        The last `num_drafts` rows keep their drafts there, which the sampler may read.
        """
        positions = self.num_tokens[rows]
        references = -1 - rows
        if num_drafts:
            references[-num_drafts:] = self.token_ids[rows[-num_drafts:], positions[-num_drafts:]]
        self.token_ids[rows, positions] = references
        self.num_tokens[rows] = positions + 1
        self._num_pending_steps += 1
        return PendingTokens(rows, positions, self._num_plans)

    def is_owned(self, pending: PendingTokens) -> npt.NDArray[np.bool_]:
        """Returns which rows of a step in flight still have the request that they had at its launch, [S]."""
        return self._vacated[pending.rows] <= pending.plan_index

    def write_tokens(self, pending: PendingTokens, token_ids: Int64Array) -> None:
        """Writes the tokens of a step to the rows whose request has not changed since its launch.

        Args:
            pending: result of `reserve_tokens`.
            token_ids: [S]; -1 for a row that failed and will be removed.
        """
        self._num_pending_steps -= 1
        rows, positions = pending.rows, pending.positions
        is_written = token_ids >= 0
        if pending.plan_index < self._num_plans:
            is_written &= self.is_owned(pending)
        if not is_written.all():
            rows, positions, token_ids = rows[is_written], positions[is_written], token_ids[is_written]
        self.token_ids[rows, positions] = token_ids

    def extend(self, pending: PendingTokens, tokens: Sequence[Sequence[int]]) -> None:
        """Replaces the drafts of the last rows of a step by the tokens that these rows yield.

        Args:
            pending: of the newest plan, whose first tokens have been written.
            tokens: of each of the rows, the first ones included; empty for a row that failed and will be removed.
        """
        assert pending.plan_index == self._num_plans, "a step began before the tokens of its rows were known"
        first = len(pending.rows) - len(tokens)
        for row, position, token_ids in zip(pending.rows[first:], pending.positions[first:], tokens, strict=True):
            self.token_ids[row, position : position + len(token_ids)] = token_ids
            self.num_tokens[row] = position + max(1, len(token_ids))

    def check_integrity(self) -> None:
        """Asserts the invariants of the class."""
        rows = [*self._row_of.values(), *self._free_rows]
        assert sorted(rows) == list(range(len(self.num_tokens))), "a row is lost or has two owners"

    def _add(self, requests: Sequence[NewRequest]) -> None:
        """Gives each request a row. Writes columns as a whole, since each assignment in NumPy has a fixed cost."""
        rows = []
        for request in requests:
            assert request.request_id not in self._row_of, f"request {request.request_id} is known already"
            row = self._free_rows.pop()
            self._row_of[request.request_id] = row
            rows.append(row)
            self.token_ids[row, : len(request.token_ids)] = request.token_ids
            self.num_blocks[row] = 0
            self._append_blocks(row, request.block_ids)
        self.num_tokens[rows] = [len(request.token_ids) for request in requests]
        self.num_prompt_tokens[rows] = [request.num_prompt_tokens for request in requests]
        self.adapters[rows] = [-1 if request.adapter is None else request.adapter for request in requests]
        self.sampling.set_rows(rows, [request.params for request in requests])

    def _append_blocks(self, row: int, block_ids: tuple[int, ...]) -> None:
        """Appends blocks to the tables of a row; of each position, the block of each group."""
        num_groups = len(self.block_table)
        start, num_blocks = self.num_blocks[row], len(block_ids) // num_groups
        for group, block_table in enumerate(self.block_table):
            block_table[row, start : start + num_blocks] = block_ids[group::num_groups]
        self.num_blocks[row] = start + num_blocks
