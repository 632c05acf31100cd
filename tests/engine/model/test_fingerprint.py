"""Two models have two fingerprints; the same files always have one."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.model import fingerprint
from engine.model.fingerprint import SLICE_BYTES, weights_fingerprint, weights_identity


def _write(path: Path, weights: bytes, config: bytes = b"{}", name: str = "model.safetensors") -> Path:
    path.mkdir()
    (path / "config.json").write_bytes(config)
    (path / name).write_bytes(weights)
    if name != "model.safetensors":
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"tensor": name}}))
    return path


def test_equal_files_have_equal_fingerprints(tmp_path: Path) -> None:
    weights = bytes(range(256)) * 8192
    one, two = _write(tmp_path / "a", weights), _write(tmp_path / "b", weights)
    assert weights_fingerprint(one) == weights_fingerprint(two)
    assert len(weights_fingerprint(one)) == 32


def test_other_weights_size_config_or_name_show(tmp_path: Path) -> None:
    weights = bytes(2**21)
    folders = [
        _write(tmp_path / "a", weights),
        _write(tmp_path / "b", b"\1" * 2**21),
        _write(tmp_path / "c", weights + b"\0"),
        _write(tmp_path / "d", weights, config=b"{ }"),
        _write(tmp_path / "e", weights, name="other.safetensors"),
        _write(tmp_path / "f", weights[:-1] + b"\1"),
    ]
    assert len({weights_fingerprint(folder) for folder in folders}) == len(folders)


def test_tiny_files_are_read_whole(tmp_path: Path) -> None:
    one, two = _write(tmp_path / "a", b"123"), _write(tmp_path / "b", b"124")
    assert weights_fingerprint(one) != weights_fingerprint(two)


def test_any_write_changes_the_identity(tmp_path: Path) -> None:
    """Also one that keeps name, size, modification time and everything that the fingerprint reads."""
    folder = _write(tmp_path / "a", bytes(2**21))
    file = folder / "model.safetensors"
    identity, fingerprint, before = weights_identity(folder), weights_fingerprint(folder), file.stat()
    assert weights_identity(folder) == identity
    with file.open("r+b") as writer:
        writer.seek(SLICE_BYTES + 1)
        writer.write(b"1")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = file.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert weights_fingerprint(folder) == fingerprint
    assert weights_identity(folder) != identity


def test_a_file_moved_to_the_place_of_another_changes_the_identity(tmp_path: Path) -> None:
    folder, other = _write(tmp_path / "a", bytes(2**21)), _write(tmp_path / "b", bytes(2**21))
    identity = weights_identity(folder)
    folder.rename(tmp_path / "old")
    other.rename(folder)
    assert weights_identity(folder) != identity
    assert weights_identity(tmp_path / "old") == identity


def test_another_inode_alone_changes_the_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a copy that sets all times, on a file system that can set the time of change."""
    folder = _write(tmp_path / "a", b"123")
    status = (folder / "model.safetensors").stat()

    def identity(number: int) -> str:
        fields = {name: getattr(status, name) for name in ("st_size", "st_mtime_ns", "st_ctime_ns")}
        file = SimpleNamespace(stat=lambda: SimpleNamespace(st_ino=number, **fields))
        monkeypatch.setattr(fingerprint, "open_checkpoint", lambda _: SimpleNamespace(weights_files=lambda: [file]))
        monkeypatch.setattr(fingerprint, "weights_fingerprint", lambda _: "same")
        return weights_identity(folder)

    assert identity(1) == identity(1)
    assert identity(1) != identity(2)
