"""Checks a checkpoint by its config.json and the names of its files, without torch.

An engine does so before it imports its libraries, so that a model that cannot be served is refused at once. Headers
and contents of weights are checked later, by `check_weights`.
"""

from pathlib import Path

from engine.errors import CheckpointError
from engine.model.checkpoint import open_checkpoint
from engine.model.checkpoint_file import exists
from engine.model.checkpoint_folder import format_of
from engine.model.config import ModelConfig
from engine.model.gguf_checkpoint import is_gguf
from engine.model.implementation import ModelImpl, choose_implementation
from engine.model.shapes import find_shape
from engine.parallel.layout import ONE_RANK, RankLayout

_BEGINNINGS_OF_PATHS = ("/", "./", "../", "~")


def local_model(name: str, *, is_dummy: bool = False) -> Path | None:
    """Finds a model on this machine: a bundled shape, if weights will be random, a folder, or a GGUF file.

    Returns: its path; None: the name is not of this machine, but may be of a hub repository.
    Raises: CheckpointError: the name is another file, cannot be accessed, or is a path that does not exist.
    """
    if is_dummy and (shape := find_shape(name)) is not None:
        return shape
    path = Path(name).expanduser()
    try:
        if path.is_dir() or (is_gguf(path) and exists(path)):
            return path
        if path.exists():
            raise CheckpointError(
                f"{name}: is a file, expected a checkpoint folder or a GGUF file{format_of(path.name)}"
            )
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be accessed: {error.strerror}") from error
    if name.startswith(_BEGINNINGS_OF_PATHS):
        raise CheckpointError(f"{name}: no such file or folder")
    return None


def check_folder(
    model_dir: Path,
    *,
    is_dummy: bool = False,
    is_without_weights: bool = False,
    model_impl: ModelImpl = "auto",
    layout: RankLayout = ONE_RANK,
) -> ModelConfig | None:
    """Checks that a folder has the files of a supported model, or that a GGUF file describes one.

    Args:
        model_dir: the checkpoint.
        is_dummy: weights will be random, and a tokenizer is optional.
        is_without_weights: they will be downloaded if the rest can be served.
        model_impl, layout: see `choose_implementation`.
    Returns: the checked config.json; None: transformers computes the model, and checks more of it.

    Raises:
        CheckpointError: what is missing or not supported, what the folder has instead, and what to do.
        ConfigError: see `choose_implementation`.
    """
    checkpoint = open_checkpoint(model_dir)
    implementation = choose_implementation(model_dir, model_impl, layout=layout)
    config = ModelConfig.from_dir(model_dir) if implementation == "chairlift" else None
    if not (is_dummy or is_without_weights):
        checkpoint.weights_files()
    if not is_dummy:
        checkpoint.require_tokenizer()
    return config
