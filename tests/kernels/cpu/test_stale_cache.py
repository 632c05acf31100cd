"""Compiled kernels do not outlive a change of any source beside them."""

import os

import pytest

from kernels.cpu.jit import _drop_stale_cache


@pytest.fixture
def folder(tmp_path):
    """Sources changed at 100 and 300 seconds, and what was compiled around them."""
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


def test_what_is_older_than_the_newest_source_goes(folder):
    _drop_stale_cache(folder)
    left = {path.name for path in (folder / "__pycache__").iterdir()}
    assert left == {"new.g-1.py311.1.nbc", "old.cpython-311.pyc"}


def test_entries_that_cannot_be_deleted_are_left(folder, monkeypatch):
    def unlink(_path):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.unlink", unlink)
    _drop_stale_cache(folder)
    assert len(list((folder / "__pycache__").iterdir())) == 4
