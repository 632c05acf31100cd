"""A model's name -> a folder on this machine."""

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of the HTTP library in use
    HFValidationError,
    HTTPError,
    RepositoryNotFoundError,
)
from tqdm.auto import tqdm

from engine.errors import CheckpointError

_FILES = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",  # not consolidated.safetensors, a second copy that some repositories hold
    "model.safetensors.index.json",
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.jinja",
]
"""Everything that is read of a checkpoint; weights in other formats are not fetched."""


def resolve_model(name_or_dir: str, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Finds a checkpoint folder, fetching it from the Hugging Face hub where needed.

    Args:
        name_or_dir: a folder, taken as it is, or the id of a hub repository such as `Qwen/Qwen3-0.6B`.
        progress: told how much of it has been fetched.
    Returns: the folder.
    Raises: CheckpointError: neither a folder nor fetchable; says why.
    """
    path = Path(name_or_dir).expanduser()
    try:
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(f"{name_or_dir}: is a file, expected a checkpoint folder")
    except OSError as error:
        raise CheckpointError(f"{name_or_dir}: cannot be looked at: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a disk that may be too small: if it is, the error says so
            return Path(snapshot_download(name_or_dir, allow_patterns=_FILES, tqdm_class=_bar(progress)))
    except HFValidationError:
        raise CheckpointError(f"{name_or_dir}: no such folder, and not a Hugging Face hub id (owner/name)") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name_or_dir}: no such folder, and the Hugging Face hub has no such model (a private one needs HF_TOKEN)"
        ) from None
    except (HTTPError, OSError) as error:  # of the hub's own errors, all that a fetch may end in are one or the other
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{name_or_dir}: no such folder, and cannot be fetched from the Hugging Face hub: {reason}"
        ) from error


def _bar(progress: Callable[[str], None]) -> type["tqdm[Any]"]:
    """The progress bar that the hub wants, which draws nothing and tells the bytes that are here."""

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:  # noqa: ARG002 - `name` is the hub's own
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def __del__(self) -> None:
            """Nothing, where tqdm draws once more: of a fetch that has failed nobody wants to hear."""

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B" and self.total:
                share = 100 * self.n // self.total
                progress(f"fetching the model {share:.0f} % ({self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB)")

    return Bar
