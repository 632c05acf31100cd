"""Fixtures of all tests of CPU kernels."""

import pytest
import torch

from kernels.cpu.recording import Recording


@pytest.fixture(autouse=True)
def results_are_nan_before_they_are_computed(monkeypatch):
    """Fills the memory of results with NaN, so that a value that no thread computes is noticed."""
    empty = Recording.empty

    def poisoned(self, like, *shape):
        return empty(self, like, *shape).fill_(torch.nan)

    monkeypatch.setattr(Recording, "empty", poisoned)
