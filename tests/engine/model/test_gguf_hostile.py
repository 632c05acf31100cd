"""A GGUF file that is not what it says is refused in one line, in bounded memory, before any weights are read."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from engine.bench.gguf_writer import metadata_of, tensors_of, write_gguf
from engine.errors import CheckpointError, ConfigError
from engine.model.gguf_file import MAX_ITEMS, read_gguf_header
from engine.model.gguf_tokenizer import tokenizer_files
from engine.model.model_folder import check_folder
from engine.model.tokenizer_files import TokenizerFiles

MIB = 1 << 20
NAN = struct.pack("<f", float("nan"))
WORDS = ["<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "▁", "ab", "ba", "aba", "▁a", "<|im_end|>", "  "]
SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.scores": [-float(index) for index in range(len(WORDS))],
    "tokenizer.ggml.token_type": [2, 3, 3, 6, *[1] * 7, 3, 4],
}
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "tekken",
    "tokenizer.ggml.tokens": WORDS,
    "tokenizer.ggml.token_type": [*[1] * 11, 3, 4],
    "tokenizer.ggml.merges": ["a b", "b a", "ab a"],
    "tokenizer.ggml.bos_token_id": 1,
}


def serve(path: Path) -> bool:
    """Does what an engine does with a file before it imports torch; returns whether it would serve it."""
    try:
        check_folder(path)
        TokenizerFiles.from_dir(path)
        return True
    except (CheckpointError, ConfigError) as error:
        line = str(error)
    assert "\n" not in line
    assert len(line) < 2000
    return False


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "olmo3", "qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, BYTE_LEVEL])
def test_changed_files_are_served_or_refused(
    make_checkpoint: Any, tmp_path: Path, name: str, tokenizer: dict[str, Any]
) -> None:
    """Bytes, truncations, and lengths, counts and types of any size, anywhere before the data."""
    folder, path, rng = make_checkpoint(name), tmp_path / "model.gguf", random.Random(name)
    write_gguf(path, metadata_of(folder) | tokenizer, tensors_of(folder))
    whole = path.read_bytes()
    assert serve(path)
    header = len(read_gguf_header(path).raw)
    num_refused = 0
    for _ in range(250):
        changed, position = bytearray(whole), rng.randrange(header)
        match rng.randrange(4):
            case 0:
                changed[position] = rng.randrange(256)
            case 1:
                changed[position : position + 8] = struct.pack("<Q", rng.choice((0, 1, 2**31, 2**40, 2**63, 2**64 - 1)))
            case 2:
                changed[position : position + 4] = rng.choice(
                    (b"\x00\x00\xc0\x7f", b"\xff\xff\xff\xff", b"\n\x00\x00\x00")
                )
            case 3:
                del changed[rng.randrange(position, len(changed)) :]
        path.write_bytes(changed)
        num_refused += not serve(path)
    assert num_refused > 50


def peak_of(path: Path, words: str) -> int:
    """Returns the most memory that the refusal of a tokenizer takes, in bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words):
            tokenizer_files(read_gguf_header(path))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_of_any_length_take_no_memory(tmp_path: Path) -> None:
    """40 MiB of numbers would take 10 million objects."""
    path = tmp_path / "model.gguf"
    write_gguf(path, SENTENCEPIECE | {"tokenizer.ggml.token_type": 0}, {})
    data = bytearray(path.read_bytes())
    key, count = b"tokenizer.ggml.token_type", 10 << 20
    start = data.index(key) + len(key)
    data[start : start + 8] = struct.pack("<IIQ", 9, 5, count) + bytes(4 * count)
    path.write_bytes(data)
    assert peak_of(path, f"an array of {count} values, the maximum is {MAX_ITEMS}") < 200 * MIB


@pytest.mark.slow
def test_a_vocabulary_that_can_be_divided_in_too_many_ways_is_refused(tmp_path: Path) -> None:
    """Words of one letter each, whose halves are all words."""
    tokens = ["".join(chr(0x4E00 + letter) for _ in range(length)) for letter in range(300) for length in range(1, 129)]
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [1] * len(tokens),
    }
    path = tmp_path / "model.gguf"
    write_gguf(path, SENTENCEPIECE | values, {})
    assert peak_of(path, "tokenizer.ggml.tokens can be divided in more than 2000000 ways") < 1000 * MIB
