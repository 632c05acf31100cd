"""Token masks of rows with structured-output constraints; costs nothing without such rows.

A mask is stored in a table, in the state row of its request. Static masks are computed once, others before every draw.
The latter need the previous token: such a step is sampled when the previous step has been collected, while its own
forward pass runs.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from engine.constraints.constraint import Constraint
from engine.constraints.token_bits import Words, num_words
from engine.core.outputs import SchedulerOutput
from engine.core.request import RequestId
from engine.runner.request_state import PendingTokens
from engine.runner.sampling_state import Int32Array, Int64Array
from engine.runner.stream import Stream
from kernels.sampling import TokenMasks


class MaskedRow(NamedTuple):
    """A row that samples under a constraint.

    Attributes:
        sample: index among the sampling rows.
        state_row: row in `RequestState`.
        position: output position of the token; the constraint must have accepted this many tokens first.
    """

    sample: int
    state_row: int
    position: int
    constraint: Constraint


class RowMasks:
    """The constraints of the requests in the batch, and their masks on the host and on the device."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, stream: Stream, max_steps_in_flight: int = 1) -> None:
        """Allocates the memory of all steps in flight: allocating pinned memory during a step would stall it."""
        self._shape = max_num_seqs, num_words(vocab_size)
        self._stream = stream
        self._staged: deque[torch.Tensor] = deque()
        self._device_table: torch.Tensor | None = None
        if not stream.is_inline:
            num_bytes = max_num_seqs * (8 + 4 * self._shape[1] + 4)  # state row, mask and index of a mask
            self._staged.extend(stream.host_buffer(num_bytes) for _ in range(max_steps_in_flight))
            self._device_table = torch.zeros(self._shape, dtype=torch.int32, device=stream.device)
        self._constraints: dict[RequestId, Constraint] = {}
        self._shown: dict[int, tuple[Constraint, int]] = {}  # by state row: constraint and number of tokens of its mask
        self.num_filled = 0  # masks computed so far
        self._table: Words | None = None

    def apply(self, plan: SchedulerOutput) -> None:
        """Applies the differences of a plan; constraints of resumed requests accept tokens drawn meanwhile."""
        if self._constraints:
            for request_id in plan.removed_request_ids:
                self._remove(request_id)
        for request in plan.new_requests:
            constraint = request.constraint
            if constraint is not None:
                self._constraints[request.request_id] = constraint
                known = request.num_prompt_tokens + constraint.num_accepted
                if len(request.token_ids) > known:
                    constraint.accept(request.token_ids[known:])

    def masked_rows(
        self, plan: SchedulerOutput, sampling_rows: Int64Array, pending: PendingTokens, num_prompt_tokens: Int32Array
    ) -> list[MaskedRow]:
        """Returns the sampling rows whose requests are constrained.

        Args:
            plan: the plan applied last.
            sampling_rows: its rows that sample.
            pending: where their tokens will be written.
            num_prompt_tokens: of these rows.
        """
        if not self._constraints:
            return []
        positions = (pending.positions - num_prompt_tokens).tolist()
        request_ids = [plan.rows[row].request_id for row in sampling_rows]
        return [
            MaskedRow(sample, state_row, position, self._constraints[request_id])
            for sample, (request_id, state_row, position) in enumerate(
                zip(request_ids, pending.rows.tolist(), positions, strict=True)
            )
            if request_id in self._constraints
        ]

    def prepare(self, masked: list[MaskedRow], num_rows: int) -> Callable[[], TokenMasks]:
        """Computes masks that are out of date.

        Args:
            masked: at least one row; the constraints know all tokens before.
            num_rows: that sample in all.
        Returns: device work that brings them to the device and says which row has which.
        """
        if self._table is None:
            self._table = np.zeros(self._shape, dtype=np.int32)  # lazily committed
        changed = [row for row in masked if self._shown.get(row.state_row) != _mask_key(row)]
        for row in changed:
            row.constraint.fill(self._table[row.state_row])
            self.num_filled += 1
            self._shown[row.state_row] = _mask_key(row)
        rows = np.full(num_rows, -1, dtype=np.int32)
        rows[[row.sample for row in masked]] = [row.state_row for row in masked]
        if self._stream.is_inline:
            masks = TokenMasks(torch.from_numpy(rows), torch.from_numpy(self._table))
            return lambda: masks
        return self._upload(rows, np.array([row.state_row for row in changed], dtype=np.int64))

    def _upload(self, rows: Int32Array, changed: Int64Array) -> Callable[[], TokenMasks]:
        """Copies everything to a buffer of the step, as the table may change before the device reads it."""
        assert self._table is not None
        assert self._device_table is not None
        device_table, parts = self._device_table, (changed, self._table[changed], rows)
        bounds = changed.nbytes, changed.nbytes + parts[1].nbytes
        sent = self._staged[0][: bounds[1] + rows.nbytes]
        self._staged.rotate(-1)
        np.concatenate([part.reshape(-1).view(np.uint8) for part in parts], out=sent.numpy())

        def upload() -> TokenMasks:
            received = sent.to(self._stream.device, non_blocking=True)
            if len(changed):
                targets, words = received[: bounds[0]].view(torch.int64), received[bounds[0] : bounds[1]]
                device_table[targets] = words.view(torch.int32).view(len(changed), -1)
            return TokenMasks(received[bounds[1] :].view(torch.int32), device_table)

        return upload

    def _remove(self, request_id: RequestId) -> None:
        constraint = self._constraints.pop(request_id, None)
        if constraint is not None:
            self._shown = {row: shown for row, shown in self._shown.items() if shown[0] is not constraint}


def are_known(masked: Iterable[MaskedRow]) -> bool:
    """Whether the constraints have accepted all previous tokens, so that the masks can be computed."""
    return all(
        not row.constraint.is_dynamic or row.constraint.num_accepted >= row.position or row.constraint.error
        for row in masked
    )


def accept(masked: Iterable[MaskedRow], token_ids: Int64Array) -> None:
    """Passes the sampled tokens to the constraints; -1 marks a failed row."""
    for row in masked:
        token_id = int(token_ids[row.sample])
        if token_id >= 0:
            row.constraint.accept((token_id,))
        else:
            row.constraint.fail("the previous token failed")


def _mask_key(row: MaskedRow) -> tuple[Constraint, int]:
    return row.constraint, row.position if row.constraint.is_dynamic else 0
