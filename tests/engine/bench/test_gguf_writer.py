"""GGUF files that benchmarks write are the checkpoints that they were made of."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from chairlift.bench.shapes import SHAPES
from engine.bench.gguf_writer import save_gguf, save_twin
from engine.bench.shapes import save_checkpoint
from engine.bench.worker import Worker
from engine.model.config import ModelConfig
from engine.model.gguf_checkpoint import GgufCheckpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint("tiny", tmp_path_factory.mktemp("checkpoint"))


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_twin_has_the_numbers_of_the_file(kind: str, dtype: torch.dtype, checkpoint: Path, tmp_path: Path) -> None:
    save_gguf(checkpoint, tmp_path / "model.gguf", kind)
    save_twin(tmp_path / "model.gguf", checkpoint, tmp_path / "twin")
    original, twin = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "twin"))
    assert original.keys() == twin.keys()
    for name, tensor in original.items():
        assert torch.equal(twin[name].float(), tensor.to(dtype).float() if tensor.ndim == 2 else tensor), name
    assert ModelConfig.from_dir(tmp_path / "twin").hidden_size == SHAPES["tiny"].hidden_size


def test_words_are_tokens_without_merges(checkpoint: Path, tmp_path: Path) -> None:
    save_gguf(checkpoint, tmp_path / "model.gguf", "BF16")
    files = GgufCheckpoint(tmp_path / "model.gguf").tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.get_vocab_size() == SHAPES["tiny"].vocab_size
    assert tokenizer.decode([7, 511]) == "w7w511"


def test_worker_writes_files_twins_and_other_dtypes(tmp_path: Path) -> None:
    worker = Worker()
    paths = [
        Path(
            worker.answer({"call": "checkpoint", "shape": "tiny", "folder": str(tmp_path / dtype), "dtype": dtype})[
                "path"
            ]
        )
        for dtype in ("float32", "bfloat16")
    ]
    single, half = (load_file(path / "model.safetensors") for path in paths)
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(single[name].bfloat16(), half[name])
    gguf, twin = tmp_path / "model.gguf", tmp_path / "twin"
    assert worker.answer({"call": "gguf", "checkpoint": str(paths[0]), "out": str(gguf), "type": "F32"}) == {}
    assert worker.answer({"call": "twin", "gguf": str(gguf), "checkpoint": str(paths[0]), "out": str(twin)}) == {}
    assert torch.equal(load_file(twin / "model.safetensors")[name], single[name])
