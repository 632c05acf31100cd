"""Cached kernels are deleted when any source file of the folder is newer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.jit import _drop_stale_cache


@pytest.fixture
def folder(tmp_path):
    """Sources changed at 100 and 300 seconds, with cache entries of 200 to 301 seconds."""
    (tmp_path / "__pycache__").mkdir()
    for name, changed_s in [
        ("old.py", 100),
        ("new.py", 300),
        ("__pycache__/old.f-1.py311.nbi", 200),
        ("__pycache__/old.f-1.py311.1.nbc", 299),
        ("__pycache__/new.g-1.py311.1.nbc", 301),
        ("__pycache__/old.cpython-311.pyc", 200),
    ]:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (changed_s, changed_s))
    return tmp_path


def test_entries_older_than_the_newest_source_are_deleted(folder):
    _drop_stale_cache(folder, folder / "__pycache__")
    left = {path.name for path in (folder / "__pycache__").iterdir()}
    assert left == {"new.g-1.py311.1.nbc", "old.cpython-311.pyc"}


def test_undeletable_entries_are_kept(folder, monkeypatch):
    def unlink(_path):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.unlink", unlink)
    _drop_stale_cache(folder, folder / "__pycache__")
    assert len(list((folder / "__pycache__").iterdir())) == 4


def test_cache_folder_in_use_is_cleaned(tmp_path):
    """With NUMBA_CACHE_DIR, stale entries are deleted there instead of beside the sources."""
    root = Path(__file__).parents[3]
    code = "from kernels.cpu.quantize import quantize_row; print(quantize_row.stats.cache_path)"
    environment = {**os.environ, "PYTHONPATH": str(root), "NUMBA_CACHE_DIR": str(tmp_path)}

    def cache_path():
        command = [sys.executable, "-c", code]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return Path(result.stdout.strip())

    stale = cache_path() / "quantize.quantize_row-1.py311.1.nbc"
    assert stale.is_relative_to(tmp_path)
    stale.touch()
    os.utime(stale, (100, 100))
    cache_path()
    assert not stale.exists()
