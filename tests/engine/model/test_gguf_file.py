"""Headers of GGUF files, and their blocks, against a file that llama.cpp's own package wrote; and hostile files.

blocks.gguf was written by the package `gguf` 0.19. It has a value of each type, and for each type of blocks a random
matrix NAME with what the package dequantises it to, NAME.expected. table_blocks.gguf has the same for types with
tables.
"""

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engine.bench.gguf_writer import Tensor, write_gguf
from engine.errors import CheckpointError
from engine.model.gguf_blocks import unpack
from engine.model.gguf_file import QUANTIZED_TYPES, REQUANTIZED_TYPES, read_gguf_header
from engine.model.gguf_requantization import as_q8_0
from engine.model.gguf_tensor_layout import TensorLayout
from engine.model.gguf_tensors import GgufTensors
from kernels.families import cpu_ops

BLOCKS = Path(__file__).with_name("blocks.gguf")
TABLE_BLOCKS = Path(__file__).with_name("table_blocks.gguf")
TABLES = ("IQ4_NL", "IQ4_XS", "MXFP4")


def read(path: Path, name: str) -> torch.Tensor:
    return GgufTensors(path, read_gguf_header(path).tensors, lambda _: TensorLayout()).get_tensor(name)


def test_a_file_that_is_gone_is_reported_and_nothing_else(tmp_path: Path) -> None:
    """Also not the end of an object without a file, which Python would report as an ignored exception."""
    with pytest.raises(FileNotFoundError):
        GgufTensors(tmp_path / "gone.gguf", {}, lambda _: TensorLayout())


def test_values_of_every_type_are_read() -> None:
    header = read_gguf_header(BLOCKS)
    assert {
        key: value for key, value in header.metadata.values.items() if isinstance(value, bool | int | float | str)
    } == {
        "general.architecture": "llama",
        "example.uint8": 200,
        "example.int8": -100,
        "example.uint16": 60000,
        "example.int16": -30000,
        "example.uint32": 4_000_000_000,
        "example.int32": -2_000_000_000,
        "example.uint64": 2**63 + 1,
        "example.int64": -(2**62),
        "example.float32": 0.5,
        "example.float64": 1e300,
        "example.bool": True,
        "example.string": "Grüße",
    }
    assert header.strings("example.strings") == ["", "a b", "Ġx"]
    assert header.integers("example.integers") == [1, -2, 3]


@pytest.mark.parametrize("kind", [*(kind for kind in QUANTIZED_TYPES if kind not in TABLES), "BF16"])
def test_blocks_stand_for_the_numbers_of_the_reference(kind: str) -> None:
    expected = read(BLOCKS, f"{kind}.expected")
    assert expected.dtype == torch.float32
    assert torch.equal(read(BLOCKS, kind).float(), expected)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"])
def test_kernels_multiply_the_numbers_of_the_reference(kind: str, quantization: Literal["int8"] | None) -> None:
    """Rows of the identity yield the weights themselves; 127 times 1 / 127 is rounded."""
    ops, expected = cpu_ops(quantization=quantization), read(BLOCKS, f"{kind}.expected")
    tensors = GgufTensors(BLOCKS, read_gguf_header(BLOCKS).tensors, lambda _: TensorLayout())
    weights = unpack(kind, tensors.get_blocks(kind))
    packed = ops.pack_grouped(weights, None, torch.float32)
    assert packed.num_bits == int(kind[1])
    found = ops.linear(torch.eye(expected.shape[1]), packed).T
    error = 0 if quantization is None else 4 * 2**-24 * weights.scales.abs().max() * 256
    assert (found - expected).abs().max() <= error


@pytest.mark.parametrize("kind", TABLES)
def test_blocks_of_a_table_stand_for_the_numbers_of_the_reference(kind: str) -> None:
    """Up to the rounding of one product in float32, which the reference does and Chairlift not."""
    expected = read(TABLE_BLOCKS, f"{kind}.expected")
    torch.testing.assert_close(read(TABLE_BLOCKS, kind), expected, atol=0, rtol=2**-23)


@pytest.mark.parametrize("kind", REQUANTIZED_TYPES)
def test_other_blocks_are_those_of_the_reference_and_in_8_bits_nearly_so(kind: str) -> None:
    pytest.importorskip("gguf", reason="the extra gguf is not installed")
    expected = read(TABLE_BLOCKS, f"{kind}.expected")
    assert torch.equal(read(TABLE_BLOCKS, kind), expected)
    blocks = GgufTensors(TABLE_BLOCKS, read_gguf_header(TABLE_BLOCKS).tensors, lambda _: TensorLayout()).get_blocks(
        kind
    )
    check_q8_0(blocks, expected)


def check_q8_0(blocks: torch.Tensor, numbers: torch.Tensor) -> None:
    """That blocks in Q8_0 are the nearest to numbers, up to half of a scale that holds the largest of a group."""
    assert blocks.shape == (len(numbers), numbers.shape[1] // 32 * 34)
    weights = unpack("Q8_0", blocks)
    largest = numbers.view(len(numbers), -1, 32).abs().amax(dim=2)
    assert (weights.scales >= largest / 127).all()
    # the next number in fp16 is 2 ** -10 larger, or 2 ** -24 of those near 0
    assert (weights.scales <= largest / 127 * (1 + 2**-10) + 2**-24).all()
    half = weights.scales.repeat_interleave(32, dim=1) / 2
    assert ((weights.dequantized(torch.float32) - numbers).abs() <= half * (1 + 2**-20)).all()


def test_numbers_of_any_size_have_blocks_in_8_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, 256, generator=generator) * 10.0 ** torch.linspace(-9, 6, 64)[:, None]
    numbers[0] = 0
    check_q8_0(as_q8_0(numbers), numbers)
    assert as_q8_0(numbers[:1]).count_nonzero() == 0


def test_numbers_beyond_fp16_have_an_infinite_scale() -> None:
    assert unpack("Q8_0", as_q8_0(torch.full((1, 32), 1e9))).scales.isinf().all()


def test_numbers_of_16_bits_are_read() -> None:
    assert torch.equal(read(BLOCKS, "F16"), read(BLOCKS, "F32").half())


@pytest.mark.parametrize("number", [1e-5, 1e-6, 500000.0, 0.1, 1 / 3, 3.4028234663852886e38, 0.0, -2.5])
def test_a_float_is_the_shortest_decimal(tmp_path: Path, number: float) -> None:
    write_gguf(tmp_path / "a.gguf", {"x": number}, {})
    found = read_gguf_header(tmp_path / "a.gguf").metadata.values["x"]
    assert struct.pack("<f", found) == struct.pack("<f", number)
    assert len(repr(found)) <= len(repr(number))


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "a.gguf", BLOCKS.read_bytes()
    header = len(read_gguf_header(BLOCKS).raw)
    for length in [*range(header), *random.Random(0).sample(range(header, len(whole) - 32), 50)]:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated or corrupt"):
            read_gguf_header(path)


def test_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    path, whole, rng = tmp_path / "a.gguf", BLOCKS.read_bytes(), random.Random(1)
    num_refused = 0
    for _ in range(1500):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(3000)] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(changed)
        try:
            header = read_gguf_header(path)
            header.strings("example.strings")
            header.integers("example.integers")
        except CheckpointError:
            num_refused += 1
        else:
            assert all(0 <= entry.start <= entry.stop <= len(whole) for entry in header.tensors.values())
    assert num_refused > 300


def packed(path: Path, metadata: bytes = b"", tensors: bytes = b"", *, counts: tuple[int, int] = (0, 0)) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + metadata + tensors)
    return path


KEY = struct.pack("<Q", 1) + b"k"
TENSOR = struct.pack("<Q", 1) + b"t"


@pytest.mark.parametrize(
    ("content", "counts", "words"),
    [
        (b"", (2**40, 0), "the number of tensors is 1099511627776, the maximum is 65536"),
        (b"", (0, 2**63), "the number of metadata values is 9223372036854775808, the maximum is 65536"),
        (struct.pack("<Q", 2**60), (0, 1), "the length of a metadata key is 1152921504606846976, the maximum is 65535"),
        (struct.pack("<Q", 1) + b"\xff", (0, 1), "a metadata key is not UTF-8"),
        ((KEY + struct.pack("<II", 4, 1)) * 2, (0, 2), "metadata key 'k' is there twice"),
        (KEY + struct.pack("<I", 13), (0, 1), "k has the type 13, expected 0 to 12"),
        (KEY + struct.pack("<IB", 7, 2), (0, 1), "k is 2, the maximum is 1"),
        (KEY + struct.pack("<IQ", 8, 9999), (0, 1), r"k ends at byte 10044, the file has 45 bytes"),
        (KEY + struct.pack("<IIQ", 9, 4, 2**28), (0, 1), "k ends at byte 1073741873, the file has 49 bytes"),
        (
            KEY + struct.pack("<IIQ", 9, 4, 2**62),
            (0, 1),
            "the number of items of k is 4611686018427387904",
        ),
        (
            KEY + struct.pack("<IIQQ", 9, 8, 1, 2**63),
            (0, 1),
            "k ends at byte 92233720368547758.., the file has",
        ),
        (KEY + struct.pack("<IIQ", 9, 9, 1), (0, 1), "k has items of the type 9, supported are numbers and strings"),
        (TENSOR + struct.pack("<I", 5), (1, 0), "the number of dimensions of tensor t is 5, the maximum is 4"),
        (TENSOR + struct.pack("<IQIQ", 1, 4, 19, 0), (1, 0), r"dimensions \[4\], .* in IQ1_S .* a multiple of 256"),
        (TENSOR + struct.pack("<IQIQ", 1, 4, 99, 0), (1, 0), r"tensor t is of type 99, supported are F32 \(0\), F16"),
        (TENSOR + struct.pack("<IQIQ", 1, 48, 8, 0), (1, 0), r"dimensions \[48\], .* in Q8_0 .* a multiple of 32"),
        (TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0), (1, 0), r"tensor t has the dimensions \[0\], expected numbers > 0"),
        (TENSOR + struct.pack("<IQIQ", 1, 2**63, 0, 2**63), (1, 0), "at offset 9223372036854775808 ends at byte 4611"),
        ((TENSOR + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2, (2, 0), "tensor t is there twice"),
    ],
)
def test_impossible_numbers_are_refused_by_name(
    tmp_path: Path, content: bytes, counts: tuple[int, int], words: str
) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_gguf_header(packed(tmp_path / "a.gguf", content, counts=counts))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(b"GGML" + bytes(99)), "is no GGUF file: it does not begin with GGUF"),
        (lambda path: path.write_bytes(b"GGUF" + struct.pack(">I", 3)), "version of the format is 50331648, supported"),
        (lambda path: path.mkdir(), "is a folder, expected a regular file"),
        (os.mkfifo, "is a named pipe, expected a regular file"),
        (lambda path: None, "no such file"),
    ],
)
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, change: Callable[[Path], Any], words: str) -> None:
    change(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match=words):
        read_gguf_header(tmp_path / "a.gguf")


def test_an_array_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", {"texts": ["a"], "numbers": [1], "one": 1}, {})
    header = read_gguf_header(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="texts is an array of 1 values of another type, expected integers"):
        header.integers("texts")
    with pytest.raises(CheckpointError, match="numbers is an array of 1 values of another type, expected strings"):
        header.strings("numbers")
    with pytest.raises(CheckpointError, match="one is 1, expected an array"):
        header.integers("one")
    with pytest.raises(CheckpointError, match="other is missing"):
        header.strings("other")


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    data = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8).numpy().tobytes() + bytes(32)
    write_gguf(path, {}, {"x": Tensor("Q8_0", (1, 32), data)})
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor x holds NaN or infinity"):
        read(path, "x")
