"""Packed weights of an earlier start: found, replaced, bounded, and never in the way of a start."""

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from engine.errors import CheckpointError
from engine.model import packed_cache
from engine.model.packed_cache import FOLDER, PackedCache

WEIGHT = torch.arange(1000.0)


def never() -> NoReturn:
    raise AssertionError("packed again")


def cache_in(folder: Path, key: str = "model", max_bytes: int = 10**9) -> PackedCache:
    return PackedCache(folder, max_bytes, lambda: key)


def fill(cache: PackedCache, weight: torch.Tensor = WEIGHT) -> None:
    """Starts once, without weights of an earlier start, and waits until they are saved."""
    packed = cache.open()
    assert not packed.is_stored
    assert packed("weight", lambda: weight) is weight
    thread = packed.save()
    assert thread is not None
    thread.join()


def files(folder: Path) -> list[Path]:
    return sorted((folder / FOLDER).iterdir())


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_the_second_start_packs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(cache_in(tmp_path / "new"))
    packed = cache_in(tmp_path / "new").open()
    assert packed.is_stored
    assert torch.equal(packed("weight", never), WEIGHT)
    assert packed.save() is None
    assert warnings_in(caplog) == []
    [file] = files(tmp_path / "new")
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_another_key_finds_nothing(tmp_path: Path) -> None:
    fill(cache_in(tmp_path))
    fill(cache_in(tmp_path, "another"), WEIGHT + 1)
    assert len(files(tmp_path)) == 2
    assert torch.equal(cache_in(tmp_path).open()("weight", never), WEIGHT)


def test_weights_in_use_outlive_their_folder(tmp_path: Path) -> None:
    fill(cache_in(tmp_path))
    weight = cache_in(tmp_path).open()("weight", never)
    for file in files(tmp_path):
        file.unlink()
    (tmp_path / FOLDER).rmdir()
    assert torch.equal(weight, WEIGHT)
    fill(cache_in(tmp_path))


def test_a_damaged_file_is_replaced_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(cache_in(tmp_path))
    [file] = files(tmp_path)
    os.truncate(file, 1000)
    fill(cache_in(tmp_path))
    assert warnings_in(caplog) == [f"{file} is damaged (truncated): the weights are packed again"]
    assert cache_in(tmp_path).open().is_stored


def test_files_used_least_recently_are_removed_beyond_the_limit(tmp_path: Path) -> None:
    for number in range(3):
        fill(cache_in(tmp_path, f"model {number}"))
        os.utime(next(file for file in files(tmp_path) if file.stat().st_mtime > 10**9), (number, number))
    assert cache_in(tmp_path, "model 0").open().is_stored, "which is a use"
    fill(cache_in(tmp_path, "model 3", sum(file.stat().st_size for file in files(tmp_path))))
    stored = [cache_in(tmp_path, f"model {number}").open().is_stored for number in range(4)]
    assert stored == [True, False, True, True]


def test_weights_beyond_the_limit_are_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(cache_in(tmp_path, max_bytes=3999))
    [warning] = warnings_in(caplog)
    assert "they take 4000 bytes, --packed-cache-bytes is 3999" in warning
    assert files(tmp_path) == []


def test_a_full_disk_leaves_nothing_and_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write: Callable[..., None] = packed_cache.write_packed

    def write_until_full(file: Any, objects: Any) -> None:
        write(file, objects)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_cache, "write_packed", write_until_full)
    fill(cache_in(tmp_path))
    assert files(tmp_path) == []
    [warning] = warnings_in(caplog)
    assert warning.endswith("No space left on device")


def test_too_little_room_is_seen_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = packed_cache.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(packed_cache.shutil, "disk_usage", lambda _: usage._replace(free=3999))
    fill(cache_in(tmp_path))
    assert files(tmp_path) == []
    [warning] = warnings_in(caplog)
    assert warning.endswith("they take 4000 bytes, 3999 are free")


def test_a_model_that_changed_while_it_was_read_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = iter(["before", "after"])
    fill(PackedCache(tmp_path, 10**9, lambda: next(keys)))
    assert files(tmp_path) == []
    [warning] = warnings_in(caplog)
    assert warning.endswith("the model was changed while it was read")


def test_a_model_that_is_gone_when_it_was_read_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = iter(["before"])

    def key() -> str:
        if (found := next(keys, None)) is None:
            raise CheckpointError("model.safetensors: no such file")
        return found

    fill(PackedCache(tmp_path, 10**9, key))
    assert files(tmp_path) == []
    [warning] = warnings_in(caplog)
    assert warning.endswith("model.safetensors: no such file")


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(cache_in(tmp_path))
    (tmp_path / FOLDER).chmod(0o770)
    fill(cache_in(tmp_path))
    assert [warning.endswith("other users can write to it, remove it") for warning in warnings_in(caplog)] == [True] * 2
    (tmp_path / FOLDER).chmod(0o700)
    assert cache_in(tmp_path).open().is_stored


def test_no_folder_is_one_line_and_a_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    fill(cache_in(tmp_path / "file"))
    [warning] = warnings_in(caplog)
    assert warning.endswith("Not a directory")


def test_what_an_ended_process_left_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    fill(cache_in(tmp_path))
    left, written = tmp_path / FOLDER / "left.tmp", tmp_path / FOLDER / "written.tmp"
    left.touch()
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fill(cache_in(tmp_path, "another"))
        assert written in files(tmp_path)
        assert len(files(tmp_path)) == 3
    assert left not in files(tmp_path)


def test_a_file_is_locked_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no other start takes it for one that an ended process has left."""
    refused = []
    write: Callable[..., None] = packed_cache.write_packed

    def write_and_try(file: Any, objects: Any) -> None:
        with Path(file.name).open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        refused.append(True)
        write(file, objects)

    monkeypatch.setattr(packed_cache, "write_packed", write_and_try)
    fill(cache_in(tmp_path))
    assert refused == [True]


def test_a_process_need_not_wait_for_the_file_to_be_written(tmp_path: Path) -> None:
    packed = cache_in(tmp_path).open()
    packed("weight", lambda: WEIGHT)
    thread = packed.save()
    assert isinstance(thread, threading.Thread)
    assert thread.daemon
    thread.join()
