"""One draw for all ranks: rank 0 samples, and its token ids are broadcast inside the step.

Every rank could sample for itself: the gathered logits are copies, and draws are keyed by seed and position. But then a
sampler that adds up in another order on one device would leave ranks with different tokens, and from there on with keys
and values that do not belong together: wrong answers, and nobody to notice. Ids that are copied cannot differ, on
whatever devices; the price is one message of 8 bytes per row. It is a collective of the device, so with two steps in
flight the next step reads the ids without the host having seen them.
"""

from typing import Any, cast

import torch

from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps
from kernels.sampling import RowStatus, SampledTokens, SamplingBatch


def with_shared_draws(ops: KernelOps, group: ParallelGroup) -> KernelOps:
    """The same operations, except that `sample` gives every rank the tokens that rank 0 draws."""
    return ops if group.size == 1 else cast(KernelOps, _SharedDraws(ops, group))


class _SharedDraws:
    """Operations of which `sample` meets the other ranks; everything else is passed through."""

    def __init__(self, ops: KernelOps, group: ParallelGroup) -> None:
        self._ops = ops
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row on rank 0. Elsewhere log-probabilities are NaN, and why a row failed is not known."""
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
