"""An unwritable kernel cache causes a warning and does not end the process; the disk is fake."""

import errno
import logging
import os
from pathlib import Path

import pytest
import triton
import triton.runtime.cache

from kernels.gpu import kernel_cache
from kernels.gpu.kernel_cache import KernelCache, NoRoomError, use_kernel_cache


class Disk:
    """A fake disk with room for `room` more files below a folder; other paths are not limited."""

    def __init__(self, folder, room):
        self.folder, self.room = str(folder), room

    def open(self, path, *args, **kwargs):
        file = open(path, *args, **kwargs)  # noqa: SIM115, PTH123 - the caller closes it
        if str(path).startswith(self.folder) and "w" in (args or "r")[0]:
            self.room -= 1
            if self.room < 0:  # as on a full disk: the file exists without its contents
                file.close()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return file


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    kernel_cache._make_temporary_folder.cache_clear()
    kernel_cache._warn_uncached.cache_clear()
    yield tmp_path / "cache"
    kernel_cache._make_temporary_folder.cache_clear()


@pytest.fixture
def fill(folder, monkeypatch):
    return lambda room: monkeypatch.setattr(triton.runtime.cache, "open", Disk(folder, room).open, raising=False)


def put_all(key):
    """Writes the files of a kernel as Triton does."""
    cache = KernelCache(key)
    group = {
        name: cache.put(data, name) for name, data in {"k.ptx": "ptx", "k.cubin": b"cubin", "k.json": "{}"}.items()
    }
    cache.put_group("k.json", group)
    return group


def test_writable_cache_is_tritons(folder, caplog):
    group = put_all("A")
    assert KernelCache("A").get_group("k.json") == group
    assert all(path.startswith(str(folder)) for path in group.values())
    assert not caplog.records


@pytest.mark.parametrize("room", range(4))
def test_full_disk_causes_one_warning_and_leaves_no_partial_kernel(folder, fill, caplog, room):
    fill(room)
    for key in "AB":
        group = put_all(key)
        assert {name: Path(path).read_bytes() for name, path in group.items()} == {
            "k.ptx": b"ptx", "k.cubin": b"cubin", "k.json": b"{}"
        }  # fmt: skip
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"not cached, every start compiles them again: {folder}: No space left on device" in record.getMessage()
    assert not list(folder.glob("*/__grp__*"))  # which is what the next start looks for
    assert KernelCache("A").get_group("k.json") is None
    assert not list(folder.glob("*/tmp.pid_*"))


def test_folder_that_cannot_be_created_causes_one_warning(folder, caplog):
    folder.write_text("a file")
    for key in "AB":
        assert all(Path(path).exists() for path in put_all(key).values())
    assert [f"{folder}: Not a directory" in record.getMessage() for record in caplog.records] == [True]


def test_without_space_anywhere_the_disk_error_is_raised(folder, monkeypatch):
    monkeypatch.setattr(triton.runtime.cache, "open", Disk(folder.parent, 0).open, raising=False)
    with pytest.raises(OSError, match="No space left") as caught:
        put_all("A")
    assert "GPU kernels cannot be compiled: No space left on device; make room in" in str(NoRoomError(caught.value))


def test_cache_manager_of_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    use_kernel_cache()
    assert triton.knobs.cache.manager_class is KernelCache
    theirs = type("Theirs", (triton.runtime.cache.FileCacheManager,), {})
    monkeypatch.setattr(triton.knobs.cache, "manager_class", theirs)
    use_kernel_cache()
    assert triton.knobs.cache.manager_class is theirs
