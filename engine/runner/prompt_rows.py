"""Sampler rows for prompt logprobs: each is forced to the next prompt token, whose logprobs are then reported like
those of a sampled token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.core.outputs import SchedulerOutput, TokenLogprobs
from engine.runner.request_state import RequestState
from engine.runner.sampling_state import Int32Array, Int64Array
from engine.runner.step_buffers import Array, StepSections


class PromptRows(NamedTuple):
    """F rows of the sampler, after the sampling rows.

    Attributes:
        plan_rows: [F], their rows of the plan.
        top_logprobs: [F], number of alternatives per row.
        max_top_logprobs: the largest of them; -1 if there are no rows.
    """

    plan_rows: Int64Array
    top_logprobs: Int32Array
    max_top_logprobs: int

    def logprobs(self, sampled: Mapping[int, TokenLogprobs], num_samples: int) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Returns their logprobs by row of the plan; incomplete for a row with a failure.

        Args:
            sampled: logprobs by row of the sampler.
            num_samples: number of sampling rows, which come first.
        """
        if self is NO_PROMPT_ROWS:
            return {}
        by_row: dict[int, list[TokenLogprobs]] = {}
        for index, plan_row in enumerate(self.plan_rows.tolist(), num_samples):
            if index in sampled:
                by_row.setdefault(plan_row, []).append(sampled[index])
        return {plan_row: tuple(logprobs) for plan_row, logprobs in by_row.items()}


NO_PROMPT_ROWS = PromptRows(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32), -1)


def fill_prompt_rows(
    plan: SchedulerOutput, rows: Int64Array, num_samples: int, state: RequestState, out: StepSections[Array]
) -> PromptRows:
    """Writes the prompt rows of a step after the sampling rows, which have been written.

    Args:
        plan: has rows with `num_prompt_logits`.
        rows: state rows of the plan's rows.
        num_samples: number of sampling rows.
        state: holds the prompts.
        out: has `query_start_loc`; gets logits indices, forced ids and parameters.
    """
    plan_rows: list[int] = []
    positions: list[int] = []
    for index, row in enumerate(plan.rows):
        if row.num_prompt_logits:
            plan_rows += [index] * row.num_prompt_logits
            positions += row.prompt_logits(int(state.num_prompt_tokens[rows[index]]))
    index_of, position_of = np.array(plan_rows), np.array(positions)
    computed = np.array([plan.rows[index].num_computed_tokens for index in plan_rows])
    state_rows = rows[index_of]
    own = slice(num_samples, num_samples + len(plan_rows))
    out.logits_indices[own] = out.query_start_loc[index_of] + position_of - computed
    out.forced_ids[:num_samples] = -1
    out.forced_ids[own] = state.token_ids[state_rows, position_of + 1]
    top_logprobs = state.sampling.fill_forced(state_rows, own, out)
    return PromptRows(index_of, top_logprobs, int(top_logprobs.max()))
