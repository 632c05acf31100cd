"""The engine and `transformers` read every shape as the same model."""

from pathlib import Path

import pytest
import torch

from chairlift.bench.shapes import SHAPES, write_shape
from engine.bench.shapes import save_checkpoint
from engine.model.config import ModelConfig
from engine.model.tokenizer_files import TokenizerFiles


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_a_model_of_the_engine(name: str, tmp_path: Path) -> None:
    path = write_shape(name, tmp_path)
    config, shape = ModelConfig.from_dir(path), SHAPES[name]
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (
        shape.num_hidden_layers,
        shape.hidden_size,
        shape.vocab_size,
    )
    assert config.tie_word_embeddings
    assert TokenizerFiles.from_dir(path).files


@pytest.mark.parametrize(
    ("name", "num_weights"), [("15M", 15e6), ("135M", 134.5e6), ("0.6B", 596e6), ("1.2B", 1.236e9)]
)
def test_the_names_say_how_many_weights_there_are(name: str, num_weights: float) -> None:
    shape = SHAPES[name]
    assert shape.num_body_weights + shape.num_head_weights == pytest.approx(num_weights, rel=0.02)


def test_a_checkpoint_is_determined_by_its_seed_and_has_the_declared_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = [
        load_file(save_checkpoint("tiny", tmp_path / folder, seed=seed) / "model.safetensors")
        for folder, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(tensors[0][name], tensors[1][name])
    assert not torch.equal(tensors[0][name], tensors[2][name])
    assert tensors[0][name].std().item() == pytest.approx(SHAPES["tiny"].intermediate_size ** -0.5, rel=0.05)
    shape = SHAPES["tiny"]
    num_weights = sum(tensor.numel() for tensor in tensors[0].values() if tensor.ndim == 2)
    assert num_weights == shape.num_body_weights + shape.num_head_weights


def test_the_tokenizer_reads_ids_as_words(tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(write_shape("tiny", tmp_path) / "tokenizer.json"))
    assert tokenizer.encode("w7 w0 w511").ids == [7, 0, 511]
    assert tokenizer.decode([7, 511]) == "w7 w511"
