"""Shared sampling: rank 0 samples and broadcasts the token ids within the step.

Every rank could sample by itself, since the logits are copies and draws are keyed by seed and position. But a sampler
that sums in another order on one device would give ranks different tokens, and then inconsistent keys and values, with
wrong output that no check detects. Broadcast ids cannot differ; they cost 8 bytes per row. The broadcast is a device
collective, so that with two steps in flight the next step reads the ids without the host.
"""

from typing import Any, cast

import torch

from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch


def with_shared_draws(ops: KernelOps, group: ParallelGroup) -> KernelOps:
    """Returns operations whose `sample` gives every rank the tokens that rank 0 draws."""
    return ops if group.size == 1 else cast(KernelOps, _SharedDraws(ops, group))


class _SharedDraws:
    """Operations with a collective `sample`; all others are passed through."""

    def __init__(self, ops: KernelOps, group: ParallelGroup) -> None:
        self._ops = ops
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row on rank 0. On other ranks logprobs are NaN and the cause of a failure is unknown."""
        if self._group.rank == 0:
            sampled = self._ops.sample(logits, batch)
            self._group.broadcast(sampled.token_ids)
            return sampled
        num_rows, width = logits.shape[0], max(0, batch.max_top_logprobs)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        self._group.broadcast(token_ids)
        nothing = torch.full((num_rows, 1 + width), torch.nan, dtype=torch.float64, device=logits.device)
        return SampledTokens(
            token_ids=token_ids,
            status=torch.where(token_ids < 0, int(RowStatus.BAD_LOGITS), int(RowStatus.OK)).to(torch.int8),
            logprobs=nothing[:, 0],
            top_ids=token_ids.new_full((num_rows, width), -1),
            top_values=nothing[:, 1:],
        )
