"""Counted compiles of CPU kernels."""

import numpy as np
from numba.core import config

from kernels.cpu import jit


def test_compiled_kernel_is_counted_once(monkeypatch, tmp_path):
    """Inlined functions do not count, nor do further compiles for other types."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))  # an empty one
    monkeypatch.setattr(jit, "_kernels", [])

    @jit.inline
    def doubled(value):
        return 2 * value

    @jit.kernel
    def first(value):
        return doubled(value)

    @jit.kernel
    def second(value):
        return first(value) + 1

    counted = []
    with jit.watch_compiles(lambda done, total: counted.append((done, total))):
        assert second(3) == 7
        assert second(0.5) == 2.0
    assert counted == [(1, 2), (2, 2)]
    second(np.float32(1))
    assert len(counted) == 2
