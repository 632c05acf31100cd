"""Tokens are drawn once, by rank 0: what another rank would have drawn does not matter."""

from typing import Any

import pytest
import torch

from engine.parallel.group import SINGLE_RANK
from engine.parallel.sampling import with_shared_draws
from kernels.families import reference_ops
from kernels.sampling import RowStatus, SampledTokens, greedy_batch


class Wire:
    """A group of two, one after the other: rank 1 gets what rank 0 has broadcast."""

    def __init__(self) -> None:
        self.rank = 0
        self.size = 2
        self.sent: list[torch.Tensor] = []

    def broadcast(self, x: torch.Tensor) -> None:
        if self.rank == 0:
            self.sent.append(x.clone())
        else:
            x.copy_(self.sent.pop(0))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not part of sampling")

    all_gather_columns = all_reduce


@pytest.mark.parametrize("top_logprobs", [-1, 0, 2])
def test_ranks_with_other_logits_take_the_tokens_of_rank_0(top_logprobs: int) -> None:
    wire = Wire()
    ops = with_shared_draws(reference_ops(), wire)
    logits = torch.randn(5, 17, generator=torch.Generator().manual_seed(0))
    logits[3] = torch.nan  # a row that fails fails everywhere
    widths = torch.full((5,), top_logprobs, dtype=torch.int32)
    batch = greedy_batch(5, top_logprobs=widths, max_top_logprobs=top_logprobs)
    ours = ops.sample(logits, batch)
    wire.rank = 1
    theirs = ops.sample(-logits, batch)
    assert torch.equal(theirs.token_ids, ours.token_ids)
    assert ours.token_ids[3] == -1
    assert torch.equal(theirs.status == RowStatus.OK, ours.status == RowStatus.OK)
    for name in SampledTokens.__dataclass_fields__:
        assert getattr(theirs, name).shape == getattr(ours, name).shape, name
        assert getattr(theirs, name).dtype is getattr(ours, name).dtype, name


def test_other_operations_are_passed_through_and_one_rank_has_none_to_share_with() -> None:
    ops: Any = reference_ops()
    assert with_shared_draws(ops, SINGLE_RANK) is ops
    assert with_shared_draws(ops, Wire()).gather_rows == ops.gather_rows
