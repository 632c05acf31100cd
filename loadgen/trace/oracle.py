"""Hits of an infinite prefix cache on a trace: the upper limit for any server.

Requests are taken in order of arrival; one finds in the cache the longest beginning of its prompt that it has in common
with an earlier one, counted in tokens. A server caches whole blocks of its own size and computes at least one token of
every prompt, so it stays somewhat below; above is impossible with prompts that are new to it.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.trace.schema import Blocks, Trace


class Reuse(NamedTuple):
    """Shares, 0 to 1: of blocks found in the cache whole, of prompt tokens, and of requests that found any."""

    block_hit: float
    token_reuse: float
    requests_with_hit: float


def ideal_cached_tokens(trace: Trace) -> NDArray[np.int64]:
    """Tokens of each prompt that an infinite cache holds when it arrives.

    Returns: [requests] int64; zeros if the trace does not say what prompts share, since then none of them share
    anything.
    """
    return _hits(trace).tokens


def ideal_reuse(trace: Trace) -> Reuse:
    """The same over all requests; zeros if the trace does not say what prompts share."""
    hits = _hits(trace)
    if trace.blocks is None or len(trace.blocks.ids) == 0:
        return Reuse(0.0, 0.0, 0.0)
    return Reuse(
        block_hit=float(hits.blocks.sum() / len(trace.blocks.ids)),
        token_reuse=float(hits.tokens.sum() / trace.input_tokens.sum()),
        requests_with_hit=float(np.mean(hits.tokens > 0)),
    )


class _Hits(NamedTuple):
    tokens: NDArray[np.int64]
    blocks: NDArray[np.int64]


def _hits(trace: Trace) -> _Hits:
    """Walks all prompts at once, a block at a time, down the tree of prefixes.

    A node is all prompts with the same ids from the start to some depth. What a request finds at a node is as much of
    the block as the fullest earlier request there had, and nothing below a block that it did not find whole.
    """
    tokens, whole_blocks = np.zeros((2, len(trace)), dtype=np.int64)
    if trace.blocks is None:
        return _Hits(tokens, whole_blocks)
    counts = np.diff(trace.blocks.offsets)
    ids = _dense(trace.blocks)
    num_ids = int(ids.max(initial=0)) + 1
    block_tokens = trace.blocks.block_tokens
    active = np.flatnonzero(counts > 0)  # in order of arrival, at every depth
    node = np.zeros(len(active), dtype=np.int64)
    finding = np.ones(len(active), dtype=bool)
    for depth in range(int(counts.max(initial=0))):
        key = node * num_ids + ids[trace.blocks.offsets[active] + depth]
        node = np.unique(key, return_inverse=True)[1]
        filled = np.minimum(trace.input_tokens[active] - depth * block_tokens, block_tokens)
        found = np.where(finding, np.minimum(_fullest_before(node, filled, block_tokens), filled), 0)
        tokens[active] += found
        whole = finding & (found == filled)
        whole_blocks[active] += whole
        deeper = counts[active] > depth + 1
        active, node, finding = active[deeper], node[deeper], whole[deeper]
    return _Hits(tokens, whole_blocks)


def _fullest_before(node: NDArray[np.int64], filled: NDArray[np.int64], block_tokens: int) -> NDArray[np.int64]:
    """For each entry the largest `filled` of the entries before it at the same node, 0 if there is none."""
    by_node = np.argsort(node, kind="stable")
    base = node[by_node] * (block_tokens + 1)
    running = np.maximum.accumulate(base + filled[by_node])
    before = np.zeros(len(node), dtype=np.int64)
    before[by_node[1:]] = np.maximum(running[:-1] - base[1:], 0)
    return before


def _dense(blocks: Blocks) -> NDArray[np.int64]:
    """The ids numbered from 0."""
    return np.unique(blocks.ids, return_inverse=True)[1].astype(np.int64)
