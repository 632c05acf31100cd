"""Which all-reduces use symmetric memory, and fallbacks to NCCL; torch's operations are fakes, no GPU takes part."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.parallel.layout import RankLayout
from engine.parallel.process_group import ProcessGroup
from engine.parallel.symmetric_memory import SymmetricMemory, buffer_bytes, open_symmetric_memory
from tests.support.engine.equal_ranks import fake_collectives

CPU = torch.device("cpu")
KIB = 1024


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(operation, number of values) of each all-reduce, which doubles its tensor as that of two equal ranks does."""
    return fake_collectives(monkeypatch)


@pytest.fixture
def symmetric(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Fake torch.distributed._symmetric_memory; `multicast_ptr` and `rendezvous` can be changed."""
    fake = SimpleNamespace(multicast_ptr=0)
    fake.rendezvous = lambda _buffer, _name: SimpleNamespace(multicast_ptr=fake.multicast_ptr)
    module = "torch.distributed._symmetric_memory"
    monkeypatch.setattr(f"{module}.empty", lambda *size, dtype, device: torch.empty(*size, dtype=dtype, device=device))
    monkeypatch.setattr(f"{module}.rendezvous", lambda buffer, name: fake.rendezvous(buffer, name))
    return fake


def values(num_bytes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(num_bytes // dtype.itemsize).remainder(64).to(dtype).view(1, -1)


@pytest.mark.parametrize(
    ("multicast_ptr", "num_bytes", "way"),
    [
        (0, 16, "one shot"),
        (0, 1024 * KIB, "one shot"),
        (0, 1024 * KIB + 16, "nccl"),
        (0, 24, "nccl"),  # no multiple of 16
        (0, 0, "nccl"),
        (0x7F00, 1024 * KIB, "one shot"),
        (0x7F00, 1024 * KIB + 16, "multimem"),
        (0x7F00, 8192 * KIB, "multimem"),
        (0x7F00, 8192 * KIB + 16, "nccl"),
    ],
)
def test_the_way_follows_the_size(
    calls: list[tuple[str, int]], symmetric: SimpleNamespace, multicast_ptr: int, num_bytes: int, way: str
) -> None:
    symmetric.multicast_ptr = multicast_ptr
    group = ProcessGroup(0, RankLayout(2), CPU)
    group.use_symmetric_memory(torch.bfloat16)
    x = values(num_bytes)
    expected = 2 * x
    total = group.all_reduce(x)
    assert torch.equal(total, expected)
    assert calls == [(way, x.numel())]
    group.all_reduce(values(num_bytes) + 1)
    if way != "nccl":
        assert torch.equal(total, expected), "a later call must not change an earlier result"


def test_more_ranks_read_more_so_that_the_limit_is_lower() -> None:
    assert [buffer_bytes(size, has_multicast=False) // KIB for size in (2, 4, 8)] == [1024, 512, 256]
    memory = SymmetricMemory(values(256 * KIB)[0], "0", 8, has_multicast=False)
    assert memory.takes(values(256 * KIB))
    assert not memory.takes(values(512 * KIB))
    assert not memory.takes(values(16, torch.float32))


@pytest.mark.parametrize(
    ("rendezvous_error", "dtype", "reason"),
    [
        (RuntimeError("CUDASymmetricMemoryAllocator: pidfd_getfd failed\ntrace"), torch.bfloat16, "pidfd_getfd failed"),
        (NotImplementedError("no allocator"), torch.bfloat16, f"torch {torch.__version__} has none: no allocator"),
        (None, torch.float16, "it has no sums in float16"),
    ],
)
def test_without_symmetric_memory_nccl_is_used_with_one_line(
    calls: list[tuple[str, int]],
    symmetric: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
    rendezvous_error: Exception | None,
    dtype: torch.dtype,
    reason: str,
) -> None:
    def fails(*_: object) -> None:
        assert rendezvous_error is not None
        raise rendezvous_error

    symmetric.rendezvous = fails
    group = ProcessGroup(0, RankLayout(2), CPU)
    with caplog.at_level("INFO", "engine"):  # an earlier test may have set the level of the package's logger
        group.use_symmetric_memory(dtype)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("All-reduce: NCCL, symmetric memory cannot be used: ")
    assert line.endswith(reason)
    group.all_reduce(values(16, dtype))
    assert calls == [("nccl", 8)]


def test_all_ranks_use_nccl_if_one_of_them_must(
    calls: list[tuple[str, int]], symmetric: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessGroup, "minimum", lambda _group, _number: 0)
    group = ProcessGroup(0, RankLayout(2), CPU)
    group.use_symmetric_memory(torch.bfloat16)
    group.all_reduce(values(16))
    assert calls == [("nccl", 8)]


def test_a_pipeline_stage_of_one_rank_calls_nothing(
    calls: list[tuple[str, int]], symmetric: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    """Each layer would launch two sums of one part, and the output head a copy of all logits."""
    group = ProcessGroup(0, RankLayout(num_stages=2), CPU)
    with caplog.at_level("INFO", "engine"):
        group.use_symmetric_memory(torch.bfloat16)
    x = values(16)
    assert group.all_reduce(x) is x
    assert group.all_gather_columns(x) is x
    assert calls == []
    assert not caplog.records


def test_this_torch_has_the_operations_and_functions_that_are_called() -> None:
    """Names and parameters, on any build of torch; a CPU build cannot allocate."""
    import torch.distributed._symmetric_memory as module

    schemas = [
        torch.ops.symm_mem.one_shot_all_reduce.default._schema,
        torch.ops.symm_mem.multimem_all_reduce_.default._schema,
    ]
    for schema in schemas:
        assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]
    functions: list[Callable[..., Any]] = [module.empty, module.rendezvous]
    assert all(map(callable, functions))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            open_symmetric_memory("0", 2, torch.bfloat16, CPU)
