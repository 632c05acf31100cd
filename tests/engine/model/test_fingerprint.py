"""Two models have two fingerprints; the same files always have one."""

import json
from pathlib import Path

from engine.model.fingerprint import weights_fingerprint


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
