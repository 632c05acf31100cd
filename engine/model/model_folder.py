"""Checks a checkpoint folder by its config.json and the names of its files, without torch.

An engine does so before it imports its libraries, so that a model that cannot be served is refused at once. Headers
and contents of weights are checked later, by `check_weights`.
"""

from fnmatch import fnmatch
from pathlib import Path

from engine.errors import CheckpointError
from engine.model.checkpoint_file import exists, read_json
from engine.model.config import ModelConfig
from engine.model.implementation import ModelImpl, choose_implementation
from engine.model.shapes import find_shape

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20

_WEIGHTS_ADVICE = {
    "adapter_config.json": "a LoRA adapter: serve its base model with --lora NAME=PATH of this folder",
    "*.gguf": "in the format of llama.cpp: serve the repository of the original weights in safetensors",
    "pytorch_model*.bin": "pickled weights: convert them with transformers (from_pretrained, save_pretrained)",
    "consolidated*": "in the format of its publisher: download the repository's model*.safetensors too",
    "*.pth": "in the format of its publisher: serve a repository in the format of transformers",
    "*.onnx": "an exported graph: serve the repository of the original weights in safetensors",
    "*.safetensors": f"with another name: weights are {SINGLE_FILE}, or the files that {INDEX_FILE} names",
}
"""What a file without usable weights beside it is, and what to do; the first match counts."""

_TOKENIZER_ADVICE = {
    "tokenizer.model": "SentencePiece: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
    "*tiktoken*": "tiktoken: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
    "tekken.json": "Mistral's own format: use the tokenizer.json of a repository in the format of transformers",
    "vocab.json": "a slow tokenizer: convert it with transformers (AutoTokenizer.from_pretrained, save_pretrained)",
}


def local_model(name: str, *, is_dummy: bool = False) -> Path | None:
    """Finds a model on this machine: a bundled shape, if weights will be random, or a folder.

    Returns: its folder; None: the name is not of this machine, but may be of a hub repository.
    Raises: CheckpointError: the name is a file, or cannot be accessed.
    """
    if is_dummy and (shape := find_shape(name)) is not None:
        return shape
    path = Path(name).expanduser()
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{name}: is a file, expected a checkpoint folder{_instead_of_folder(path.name)}")
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be accessed: {error.strerror}") from error
    return None


def check_folder(
    model_dir: Path,
    *,
    is_dummy: bool = False,
    is_without_weights: bool = False,
    model_impl: ModelImpl = "auto",
    tensor_parallel_size: int = 1,
    mixes_experts: bool = True,
) -> ModelConfig | None:
    """Checks that a folder has the files of a supported model.

    Args:
        model_dir: the checkpoint folder.
        is_dummy: weights will be random, and a tokenizer is optional.
        is_without_weights: they will be downloaded if the rest can be served.
        model_impl, tensor_parallel_size, mixes_experts: see `choose_implementation`.
    Returns: the checked config.json; None: transformers computes the model, and checks more of it.

    Raises:
        CheckpointError: what is missing or not supported, what the folder has instead, and what to do.
        ConfigError: see `choose_implementation`.
    """
    if not exists(model_dir / "config.json"):
        raise CheckpointError(
            f"{model_dir / 'config.json'}: no such file; a checkpoint is a folder with config.json"
            f"{_instead(model_dir, _WEIGHTS_ADVICE)}"
        )
    implementation = choose_implementation(
        model_dir, model_impl, tensor_parallel_size=tensor_parallel_size, mixes_experts=mixes_experts
    )
    config = ModelConfig.from_dir(model_dir) if implementation == "chairlift" else None
    if not (is_dummy or is_without_weights):
        shard_files(model_dir)
    if not is_dummy:
        require_tokenizer(model_dir)
    return config


def shard_files(model_dir: Path) -> list[Path]:
    """Returns the files with the weights: one, or those that the index names.

    Raises: CheckpointError: there are none, the index cannot be read, or a file is missing.
    """
    index_path = model_dir / INDEX_FILE
    if not exists(index_path):
        if not exists(model_dir / SINGLE_FILE):
            raise CheckpointError(
                f"{model_dir}: has neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are read"
                f"{_instead(model_dir, _WEIGHTS_ADVICE)}"
            )
        return [model_dir / SINGLE_FILE]
    try:
        names = sorted(set(read_json(index_path, MAX_INDEX_BYTES)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index_path}: cannot be read as an index with a weight_map: {error!r}") from error
    files = []
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index_path}: weight_map names {name!r}, expected a file beside it")
        if not exists(model_dir / name):
            raise CheckpointError(f"{model_dir / name}: missing shard, {index_path.name} names {len(names)}")
        files.append(model_dir / name)
    return files


def require_tokenizer(model_dir: Path) -> None:
    """Checks that there is a tokenizer.json.

    Raises: CheckpointError: there is none.
    """
    if not exists(model_dir / "tokenizer.json"):
        raise CheckpointError(
            f"{model_dir / 'tokenizer.json'} is missing: a tokenizer in the Hugging Face format is required"
            f"{_instead(model_dir, _TOKENIZER_ADVICE)}"
        )


def _instead_of_folder(name: str) -> str:
    """Says what a file of this name is, and what to do; empty if the name is of no known format."""
    if fnmatch(name, "model*.safetensors"):
        return "; pass the folder that holds it"
    advice = (what for pattern, what in _WEIGHTS_ADVICE.items() if fnmatch(name, pattern))
    return f". It is {what}" if (what := next(advice, None)) else ""


def _instead(model_dir: Path, advice: dict[str, str]) -> str:
    """Names the first file that has another format, and says what to do; empty if there is none."""
    for pattern, what in advice.items():
        if found := sorted(model_dir.glob(pattern)):
            return f". The folder has {found[0].name!r}, {what}"
    return ""
