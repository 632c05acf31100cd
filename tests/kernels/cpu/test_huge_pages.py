"""Memory in huge pages: large tensors ask for them, and any size is whole, writable and given back."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from kernels.cpu.huge_pages import allocate

MIB = 1 << 20


def flags_at(address):
    """Returns the flags of the mapping of this process that has an address, None without any; see proc(5), smaps."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            begin, end = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
            is_inside = begin <= address < end
        elif is_inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (2 * MIB,), (3, 700, 1024)])
def test_tensors_are_whole_and_writable(shape, dtype):
    first, second = allocate(*shape, dtype=dtype), allocate(*shape, dtype=dtype)
    assert (first.shape, first.dtype) == (torch.Size(shape), dtype)
    assert first.is_contiguous()
    first.fill_(1)
    second.fill_(2)
    assert torch.equal(first, torch.ones(shape, dtype=dtype))


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no huge pages")
def test_large_tensors_ask_for_huge_pages_and_are_given_back():
    tensor = allocate(4 * MIB, dtype=torch.int8)
    address = tensor.data_ptr() + 2 * MIB
    assert "hg" in flags_at(address)
    del tensor
    gc.collect()
    assert "hg" not in (flags_at(address) or ())


def test_systems_without_huge_pages_have_small_ones(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert allocate(4 * MIB, dtype=torch.int8).fill_(3).sum() == 3 * 4 * MIB


def test_a_kernel_that_refuses_has_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert allocate(4 * MIB, dtype=torch.int8).fill_(3).sum() == 3 * 4 * MIB
