"""Fake collectives of two ranks with equal tensors, without GPUs: a sum doubles, a concatenation repeats."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine.parallel.process_group import ProcessGroup


def fake_collectives(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replaces torch's collectives; returns (operation, number of values) of each all-reduce, which grows."""
    seen: list[tuple[str, int]] = []

    def one_shot(x: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        assert (operation, group_name) == ("sum", "0")
        seen.append(("one shot", x.numel()))
        return 2 * x

    def multimem(x: torch.Tensor, operation: str, group_name: str) -> torch.Tensor:
        assert (operation, group_name) == ("sum", "0")
        seen.append(("multimem", x.numel()))
        return x.mul_(2)

    def nccl(x: torch.Tensor, operation: Any = dist.ReduceOp.SUM, group: None = None) -> None:
        if operation == dist.ReduceOp.SUM:
            seen.append(("nccl", x.numel()))
            x.mul_(2)

    def all_gather(gathered: torch.Tensor, x: torch.Tensor, group: None = None) -> None:
        gathered.copy_(torch.cat([x, x]))

    operations = SimpleNamespace(one_shot_all_reduce=one_shot, multimem_all_reduce_=multimem)
    monkeypatch.setattr(torch.ops, "symm_mem", operations, raising=False)
    monkeypatch.setattr(dist, "all_reduce", nccl)
    monkeypatch.setattr("engine.parallel.process_group._all_gather", all_gather)
    monkeypatch.setattr(ProcessGroup, "_group_name", lambda _: "0")
    return seen
