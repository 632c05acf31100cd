"""Checkpoints of the benchmarks: shapes that ship with the engine, and random weights that `transformers` saves."""

import json
from pathlib import Path

import torch

from chairlift.bench.shapes import SHAPES, write_shape, write_tokenizer
from engine.bench.transformers_peer import import_transformers
from engine.model.shapes import find_shape, shape_names


def model_names() -> list[str]:
    """Every shape, ours and those that come with the engine."""
    return sorted({*SHAPES, *shape_names()})


def write_model(name: str, folder: Path) -> Path:
    """`write_shape` for any name in `model_names()`; one that comes with the engine keeps its config.json."""
    if name in SHAPES:
        return write_shape(name, folder)
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    shipped = find_shape(name)
    assert shipped is not None, f"{name} is not in model_names()"
    text = (shipped / "config.json").read_text()
    (path / "config.json").write_text(text)
    write_tokenizer(path, json.loads(text)["vocab_size"])
    return path


def save_checkpoint(name: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Saves a random checkpoint that `transformers` and we load alike. Returns its folder, below `folder`.

    Matrices are drawn so that activations and logits stay near unit scale in every layer: answers then depend on their
    whole prompt, where the library's own initial weights often repeat one token endlessly. In another dtype, they are
    the same numbers rounded.
    """
    transformers = import_transformers()
    path = write_shape(name, folder)
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5, generator=generator)
    model.to(dtype).save_pretrained(path)
    return path
