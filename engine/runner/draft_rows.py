"""Sampler rows for drafts: each draws the token behind a drafted one, as if the draft were known."""

from typing import NamedTuple

import numpy as np

from engine.core.drafts import confirmed
from engine.core.outputs import SchedulerOutput
from engine.runner.sampling_state import Int64Array
from engine.runner.step_buffers import Array


class DraftRows(NamedTuple):
    """D rows of the sampler, after those of the plan's sampling rows, for the drafts of the plan's last rows.

    Attributes:
        drafts: as in the plan.
        state_rows: [D], rows in `RequestState`; those of a draft follow each other.
        offsets: [D], their places behind the row's first token, from 1.
    """

    drafts: tuple[tuple[int, ...], ...]
    state_rows: Int64Array
    offsets: Int64Array

    def confirmed(self, drawn: Int64Array) -> tuple[tuple[int, ...], ...]:
        """Returns the tokens that each of the plan's last rows yields.

        Args:
            drawn: [S + D], tokens by row of the sampler, -1 for one that failed; every row of the plan samples.
        """
        num_samples, first = len(drawn) - len(self.state_rows), len(drawn) - len(self.state_rows) - len(self.drafts)
        firsts, behind = drawn[first:num_samples].tolist(), drawn[num_samples:].tolist()
        tokens, start = [], 0
        for first_id, draft in zip(firsts, self.drafts, strict=True):
            tokens.append(confirmed(draft, (first_id, *behind[start : start + len(draft)])))
            start += len(draft)
        return tuple(tokens)


NO_DRAFT_ROWS = DraftRows((), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def fill_draft_rows(plan: SchedulerOutput, rows: Int64Array, query_start_loc: Array, out: Array) -> DraftRows:
    """Makes the rows of a plan with drafts, whose rows all sample, and writes which logits all of them need.

    Args:
        plan: has drafts.
        rows: [S], state rows of its rows.
        query_start_loc: [S + 1], see `AttentionMetadata`.
        out: logits indices; the first S + D are written.
    """
    num_rows, first = len(rows), len(rows) - len(plan.drafts)
    lengths = [len(draft) for draft in plan.drafts]
    offsets = np.concatenate([np.arange(1, length + 1) for length in lengths])
    out[:num_rows] = query_start_loc[:num_rows]
    out[num_rows : num_rows + len(offsets)] = np.repeat(query_start_loc[first:num_rows], lengths) + offsets
    return DraftRows(plan.drafts, np.repeat(rows[first:], lengths), offsets)
