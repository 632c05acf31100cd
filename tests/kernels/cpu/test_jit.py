"""Compilation and disk cache of CPU kernels: counted compiles, missing folders, failing disks, damaged files."""

import errno
import itertools
import os

import numpy as np
import pytest
from numba.core import caching, config

from kernels.cpu import jit
from kernels.cpu.jit import kernel


def test_kernels_compile_without_a_folder_to_cache_in(monkeypatch, caplog):
    """As on a read-only file system."""
    jit._warn_uncached.cache_clear()
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    @kernel
    def total(values):
        result = 0.0
        for value in values:
            result += value
        return result

    assert total(np.arange(4.0)) == 6.0
    (record,) = caplog.records
    assert "NUMBA_CACHE_DIR" in record.message


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


@pytest.mark.parametrize("method", ["_save_index", "_save_data", "_load_index"])
def test_failing_disk_causes_one_warning_and_loses_no_kernel(monkeypatch, tmp_path, caplog, method):
    number = itertools.count()

    def fail(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"file {next(number)}")

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, method, fail)
    jit._warn_uncached.cache_clear()

    @jit.kernel
    def first(value):
        return 3 * value

    @jit.kernel
    def second(value):
        return first(value) + 1

    assert second(2) == 7
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "not cached" in record.message
    assert f"{tmp_path}: No space left on device" in record.message


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_damaged_cache_file_is_compiled_and_cached_again(monkeypatch, tmp_path, caplog, suffix):
    """As after a power failure during a write."""
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_kernels", [])

    def start():
        def triple(value):
            return 3 * value

        compiled, counted = kernel(triple), []
        with jit.watch_compiles(lambda done, total: counted.append(done)):
            assert compiled(2) == 6
        return len(counted)

    assert (start(), start()) == (1, 0)
    (file,) = tmp_path.rglob(f"*.{suffix}")
    file.write_bytes(file.read_bytes()[:20])
    assert (start(), start()) == (1, 0)
    (record,) = caplog.records
    assert "its cache file is damaged" in record.message
    assert "triple" in record.message
