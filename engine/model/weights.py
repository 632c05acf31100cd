"""Weights by name: from one safetensors file, from many with an index, or random. Nothing else is ever read."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from engine.errors import CheckpointError
from engine.model.safetensors_file import read_safetensors_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Progress = Callable[[float], None]
"""Called with the fraction loaded, 0 to 1."""


def load_weights(
    path: Path, tensors: dict[str, torch.Tensor], *, progress: Progress | None = None, show_progress_bar: bool = True
) -> None:
    """Fills tensors from a checkpoint folder, converting to their dtype.

    All headers are checked before the first byte is copied, so a broken checkpoint costs no time.

    Args:
        path: folder with model.safetensors, or with model.safetensors.index.json and its shards.
        tensors: name in the checkpoint -> tensor to fill.
        progress: told the fraction of weights after each tensor.
        show_progress_bar: a bar over the shards on stderr.
    Raises: CheckpointError: a missing, unreadable, truncated or corrupt file; a missing tensor, one of another shape,
        or one that the model has no place for.
    """
    shards = _find_shards(path, tensors)
    total = sum(tensor.numel() for names in shards.values() for tensor in map(tensors.__getitem__, names))
    loaded = 0
    for file, names in tqdm(
        shards.items(),
        desc="Loading safetensors checkpoint shards",
        disable=not show_progress_bar,
        bar_format="{desc}: {percentage:3.0f}% Completed | {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}]",
    ):
        try:
            with safe_open(file, framework="pt") as reader:
                for name in names:
                    tensors[name].copy_(reader.get_tensor(name))
                    loaded += tensors[name].numel()
                    if progress is not None:
                        progress(loaded / total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error


def fill_random_weights(tensors: dict[str, torch.Tensor], seed: int) -> None:
    """Random values that keep activations near unit scale: for benchmarks and tests, without a checkpoint's weights."""
    for index, (name, tensor) in enumerate(sorted(tensors.items())):
        generator = torch.Generator(tensor.device).manual_seed(seed + index)
        if tensor.ndim == 1:
            tensor.fill_(1.0 if "norm" in name else 0.0)
        else:
            tensor.normal_(std=tensor.shape[1] ** -0.5, generator=generator)


def _find_shards(path: Path, tensors: dict[str, torch.Tensor]) -> dict[Path, list[str]]:
    """File -> names to read from it, after every check that needs no data."""
    shards: dict[Path, list[str]] = {}
    found: set[str] = set()
    for file in _shard_files(path):
        header = read_safetensors_header(file)
        for name, entry in header.tensors.items():
            if name not in tensors:
                if not _is_ignorable(name):
                    raise CheckpointError(f"{file}: tensor {name} has no place in this architecture")
                continue
            if name in found:
                raise CheckpointError(f"{file}: tensor {name} is in another shard too")
            shape = tuple(tensors[name].shape)
            if entry.shape != shape:
                raise CheckpointError(
                    f"{file}: tensor {name} has shape {list(entry.shape)}, config.json makes it {list(shape)}"
                )
            found.add(name)
            shards.setdefault(file, []).append(name)
    if missing := sorted(set(tensors) - found):
        raise CheckpointError(
            f"{path}: {len(missing)} of {len(tensors)} tensors are missing, the first is {missing[0]}"
        )
    return shards


def _shard_files(path: Path) -> list[Path]:
    index_path = path / INDEX_FILE
    if not index_path.exists():
        if not (path / SINGLE_FILE).exists():
            raise CheckpointError(f"{path}: has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read")
        return [path / SINGLE_FILE]
    try:
        names = sorted(set(json.loads(index_path.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: cannot be read as an index with a weight_map: {error!r}") from error
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path}: weight_map names {name!r}, expected a file beside it")
        if not (path / name).exists():
            raise CheckpointError(f"{path / name}: missing shard, {index_path.name} names {len(names)}")
        files.append(path / name)
    return files


def _is_ignorable(name: str) -> bool:
    """Whether no model needs it, though some checkpoints carry it: a tied head once more, rotary frequencies."""
    return name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq")
