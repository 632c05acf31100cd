"""Fixtures of the tests of GPU kernels."""

import os

import pytest
import torch

from kernels.gpu.targets import TARGETS, target_of
from tests.support.kernels.graphs import FakeGraphs
from tests.support.kernels.interpreter import patch_language_once_per_launch, sum_products_in_order

if not torch.cuda.is_available():
    patch_language_once_per_launch()

# The second seed changes with every run and is the same in all its workers; test ids show it.
_RUN_ID = os.environ.get("PYTEST_XDIST_TESTRUNUID") or os.urandom(3).hex()
SEEDS = (0, int(os.environ.get("CHAIRLIFT_TEST_SEED") or int(_RUN_ID[:6], 16)))


@pytest.fixture(params=SEEDS, ids=lambda seed: f"seed={seed}")
def seed(request):
    return request.param


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def target(device):
    """Target of the device; under the interpreter sm_90, which has every feature."""
    return target_of(device) if device.type == "cuda" else TARGETS["sm_90"]


@pytest.fixture(scope="session")
def float8(target):
    if target.fp8_dtype is None:
        pytest.skip(f"{target.name} has no 8-bit floats")
    return target.fp8_dtype


@pytest.fixture
def graphs(monkeypatch):
    """A fake of CUDA graphs in the place of torch's."""
    graphs = FakeGraphs()
    for name, replacement in graphs.patches().items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", graphs.end_allocation)
    return graphs


@pytest.fixture
def sums_in_order(monkeypatch):
    """For tests that compare bits of rows in different places of a tile; see `sum_products_in_order`."""
    sum_products_in_order(monkeypatch)


@pytest.fixture(autouse=True)
def results_are_nan_before_they_are_computed(monkeypatch):
    """Fills new memory with NaN or 0x55, so that missing writes and reads before writes are noticed."""

    def poisoned(allocate):
        def allocate_nan(*args, **options):
            tensor = allocate(*args, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(0x55)

        return allocate_nan

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
