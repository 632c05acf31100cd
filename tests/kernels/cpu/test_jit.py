"""Compiling where nothing can be cached."""

import numpy as np
from numba.core import caching

from kernels.cpu.jit import kernel


def test_kernels_compile_without_a_folder_to_cache_in(monkeypatch):
    """As on a read-only file system."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    @kernel
    def total(values):
        result = 0.0
        for value in values:
            result += value
        return result

    assert total(np.arange(4.0)) == 6.0
