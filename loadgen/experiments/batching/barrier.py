"""Blocks an engine until every request of a run is in its queue, so that all policies start from the same queue.

Without barriers the first requests to arrive would form the first batch alone, and chance would decide which requests
share a batch. Barriers are requests that are sent first: their prompts fill the token budget of every step, so that no
other request is admitted beside them, and they ask for one token. The run begins when the last barrier has finished:
then the engine is empty and the queue is complete.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadgen.step_log import Step
from loadgen.trace.schema import Accounting, Blocks, Trace

LEAD_S = 0.1
"""Seconds from the barriers to the other requests."""
SPACING_S = 0.002
"""Seconds between two of the other requests. Sent closer together, requests of different connections overtake each
other while the cores compute.
"""

_FIRST_BARRIER_BLOCK = 1 << 32  # no workload shares it


def with_barriers(trace: Trace, count: int, prompt_tokens: int) -> Trace:
    """Returns barriers, due at 0, followed by the requests of a trace in its order.

    Args:
        trace: the requests; its arrival times are not used.
        count: number of barriers.
        prompt_tokens: of each barrier, a multiple of the engine's token budget for a step.
    """
    return replace(
        trace,
        arrival_s=np.concatenate([np.zeros(count), LEAD_S + SPACING_S * np.arange(len(trace))]),
        input_tokens=np.concatenate([np.full(count, prompt_tokens, dtype=np.int64), trace.input_tokens]),
        output_tokens=np.concatenate([np.ones(count, dtype=np.int64), trace.output_tokens]),
        rows=np.concatenate([-1 - np.arange(count, dtype=np.int64), trace.rows]),  # prompts are derived from them
        blocks=None if trace.blocks is None else _with_barrier_blocks(trace.blocks, count, prompt_tokens),
        sessions=None,
    )


def only_barriers(count: int, prompt_tokens: int) -> Trace:
    """Returns barriers alone, to measure how long they take."""
    none = np.zeros(0, dtype=np.int64)
    nothing = Trace(
        "barriers", "synthetic", hashlib.sha256(b"barriers").hexdigest(), np.zeros(0), none, none, none, Accounting(0)
    )
    return with_barriers(nothing, count, prompt_tokens)


def _with_barrier_blocks(blocks: Blocks, count: int, prompt_tokens: int) -> Blocks:
    per_barrier = -(-prompt_tokens // blocks.block_tokens)
    ids = _FIRST_BARRIER_BLOCK + np.arange(count * per_barrier, dtype=np.int64)
    offsets = np.concatenate([np.arange(count, dtype=np.int64) * per_barrier, blocks.offsets + count * per_barrier])
    return Blocks(np.concatenate([ids, blocks.ids]), offsets, blocks.block_tokens)


def behind_barriers(steps: Sequence[Step], num_barriers: int, num_requests: int) -> Sequence[Step] | None:
    """Returns the steps of a run after its barriers.

    Args:
        steps: of the run, barriers first.
        num_barriers: number of barriers; each fills all its steps.
        num_requests: number of other requests.
    Returns: the steps; None if there were too few barriers: a request had not arrived when the last barrier finished,
        or was admitted beside one.
    """
    if num_barriers == 0:
        return steps
    barriers: set[int] = set()
    for index, step in enumerate(steps):
        if len(barriers) == num_barriers and not step.rows.keys() & barriers:
            is_complete = step.running + step.waiting + len(step.finished) == num_requests
            return steps[index:] if is_complete else None
        barriers |= step.rows.keys()
        if len(step.rows) > 1 or len(barriers) > num_barriers or step.num_tokens != steps[0].num_tokens:
            return None
    return None
