"""A file of packed weights gives back what was written, and a damaged one nothing."""

import re
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.packed_file import CHUNK_BYTES, DamagedFileError, map_packed, tensor_bytes, write_packed
from kernels.cpu.packed_linear import Kind, PackedLinear, pack_linear


def written(path: Path, objects: dict[str, Any]) -> Path:
    with path.open("w+b") as file:
        write_packed(file, objects)
    return path


def some_objects() -> dict[str, Any]:
    weight = torch.randn(40, 24, generator=torch.Generator().manual_seed(0))
    table = weight.to(torch.bfloat16)[:, ::2]  # not contiguous
    return {"layer": pack_linear(weight, weight[:, 0], quantize=True), "both": (table, [table, weight.half()])}


def test_objects_and_their_tensors_are_those_written(tmp_path: Path) -> None:
    objects = some_objects()
    progress: list[tuple[int, int]] = []
    found = map_packed(written(tmp_path / "file", objects), lambda done, total: progress.append((done, total)))
    layer, wanted = found["layer"], objects["layer"]
    assert isinstance(layer, PackedLinear)
    assert type(layer.kind) is Kind
    assert layer.kind is wanted.kind
    assert (layer.in_features, layer.out_features, layer.input_order) == (24, 40, None)
    for name in ("weight", "start", "bias", "scales"):
        tensor = getattr(layer, name)
        assert tensor.dtype is getattr(wanted, name).dtype
        assert torch.equal(tensor, getattr(wanted, name))
        assert tensor.data_ptr() % 64 == 0
    table, (again, half) = found["both"]
    assert table.is_contiguous()
    assert torch.equal(table, objects["both"][0])
    assert again is table, "a tensor in two places is written once"
    assert torch.equal(half, objects["both"][1][1])
    assert progress[-1][0] == progress[-1][1] >= tensor_bytes(objects)


def test_enums_are_read_again_on_early_releases_of_python_3_11(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's 3.11.2 pickles a member of an enum as a call of getattr; 3.11.7 does not."""
    monkeypatch.setattr(Kind, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    found = map_packed(written(tmp_path / "file", some_objects()))
    assert found["layer"].kind is Kind.INT8


def test_pages_are_those_of_the_file_and_outlive_it(tmp_path: Path) -> None:
    path = written(tmp_path / "file", {"numbers": torch.arange(5000)})
    found = map_packed(path)["numbers"]
    path.unlink()
    maps = Path("/proc/self/maps").read_text().splitlines()
    [line] = [line for line in maps if str(path) in line]
    first, last = (int(number, 16) for number in line.split()[0].split("-"))
    assert first <= found.data_ptr() < last
    assert line.split()[1] == "r--s", "read-only and shared"
    assert torch.equal(found, torch.arange(5000))


def test_tensors_of_all_dtypes_and_of_no_size_are_kept(tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)
    objects = {str(dtype): torch.arange(7).to(dtype) for dtype in dtypes} | {"none": torch.empty(0, 3)}
    found = map_packed(written(tmp_path / "file", objects))
    for name, tensor in objects.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["none"].shape == (0, 3)


@pytest.mark.parametrize("place", ["first chunk", "end of first chunk", "second chunk", "index", "trailer"])
def test_a_wrong_bit_anywhere_is_noticed(tmp_path: Path, place: str) -> None:
    path = written(tmp_path / "file", {"numbers": torch.zeros(CHUNK_BYTES // 8 + 100, dtype=torch.int64)})
    size = path.stat().st_size
    offset = {
        "first chunk": 0,
        "end of first chunk": CHUNK_BYTES - 1,
        "second chunk": CHUNK_BYTES + 70,
        "index": size - 100,
        "trailer": size - 1,
    }[place]
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 16]))
    with pytest.raises(DamagedFileError):
        map_packed(path)


@pytest.mark.parametrize("num_bytes", [0, 10, 66, 5000, -1])
def test_a_truncated_file_is_noticed(tmp_path: Path, num_bytes: int) -> None:
    path = written(tmp_path / "file", {"numbers": torch.arange(5000)})
    content = path.read_bytes()
    path.write_bytes(content[:num_bytes])
    with pytest.raises(DamagedFileError, match="truncated"):
        map_packed(path)


@pytest.mark.parametrize("called", [print, FileIO, pack_linear])
def test_a_file_calls_no_function_and_no_class_outside_the_kernels(tmp_path: Path, called: Any) -> None:
    """A file is data, unlike other files of pickle."""

    class Harmful:
        def __reduce__(self) -> Any:
            return called, (str(tmp_path / "made"), "w")

    path = written(tmp_path / "file", {"harmful": Harmful(), "weight": torch.ones(1)})
    message = f"names {called.__module__}.{called.__name__}, which is no class of the kernels"
    with pytest.raises(DamagedFileError, match=re.escape(message)):
        map_packed(path)
    assert not (tmp_path / "made").exists()
