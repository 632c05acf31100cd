"""Holds an engine back until every request of a run is in its queue, so that all policies start from the same queue.

Without it the first requests to arrive would be the first batch, on their own: under a static policy the rest waits for
them to end, and which requests share a batch would be left to chance. Barriers are requests too, run in front of the
others: their prompts fill the token budget of every step to the brim, so that nobody is admitted beside them, and they
ask for one token. When the last has gone, the engine is empty and the queue is complete; there the run begins.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from loadgen.experiments.batching.step_log import Step
from loadgen.trace.schema import Accounting, Blocks, Trace

LEAD_S = 0.1
"""The other requests are due this long after the barriers, which are then at work or in the queue."""
SPACING_S = 0.002
"""And this long after each other: on cores that compute, requests of different connections would else overtake each
other. Behind the barriers they wait all the same.
"""

_FIRST_GATE_BLOCK = 1 << 32  # no workload shares it


def with_barriers(trace: Trace, count: int, prompt_tokens: int) -> Trace:
    """Barriers, due at 0, and behind them the requests of a trace, in its order.

    Args:
        trace: its times do not count.
        count: barriers.
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
    """Barriers without anything behind them, to see how long they take."""
    none = np.zeros(0, dtype=np.int64)
    nothing = Trace(
        "gates", "synthetic", hashlib.sha256(b"gates").hexdigest(), np.zeros(0), none, none, none, Accounting(0)
    )
    return with_barriers(nothing, count, prompt_tokens)


def _with_barrier_blocks(blocks: Blocks, count: int, prompt_tokens: int) -> Blocks:
    per_gate = -(-prompt_tokens // blocks.block_tokens)
    ids = _FIRST_GATE_BLOCK + np.arange(count * per_gate, dtype=np.int64)
    offsets = np.concatenate([np.arange(count, dtype=np.int64) * per_gate, blocks.offsets + count * per_gate])
    return Blocks(np.concatenate([ids, blocks.ids]), offsets, blocks.block_tokens)


def behind_barriers(steps: Sequence[Step], num_barriers: int, num_requests: int) -> Sequence[Step] | None:
    """The steps of a run after its barriers.

    Args:
        steps: of the run, barriers first.
        num_barriers: how many there were; each fills all its steps alike.
        num_requests: how many others.
    Returns: the steps; None if there were too few barriers: a request had not arrived when the last one left, or was
        admitted beside one.
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
