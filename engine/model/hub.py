"""Finds the local folder or file of a model, downloading it if necessary."""

import io
import re
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
from engine.model.model_folder import local_model

_DESCRIPTION = [
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "model.safetensors.index.json",
    "tokenizer*",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.jinja",
]
"""The files that an engine reads, besides the weights."""

_UNREACHABLE = "Got: "
"""Beginning of the library's message about a hub that does not answer, if its cache lacks the files too."""

_GGUF_ID = re.compile(r"([^:]+):([A-Za-z0-9_-]{1,32})")
"""A repository, and the type at the end of the name of a file in it, such as Q8_0 or UD-Q4_K_XL."""

_OF_IMAGES = "mmproj"
"""Beginning of the names of GGUF files with the vision part of a model."""

_WEIGHTS = "model*.safetensors"
"""Not consolidated.safetensors, a second copy that some repositories hold, nor other formats."""


def resolve_model(
    name_or_dir: str, check: Callable[[Path], object], progress: Callable[[str], None] = lambda _: None
) -> Path:
    """Finds a checkpoint, or downloads it from the Hugging Face hub.

    Args:
        name_or_dir: a folder or GGUF file; the id of a hub repository, such as `Qwen/Qwen3-0.6B`; or that of a
            repository with GGUF files and a type, such as `Qwen/Qwen3-0.6B-GGUF:Q8_0`.
        check: called with a folder that has all files of a repository but its weights, before these are downloaded;
            raises if the model cannot be served.
        progress: called with a description of the progress.
    Returns: the folder or file.
    Raises: CheckpointError: the name is not a folder, and cannot be downloaded; or what `check` raises.
    """
    if (path := local_model(name_or_dir)) is not None:
        return path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about disk space; an error follows if it is too small
            if (of_gguf := _GGUF_ID.fullmatch(name_or_dir)) is not None:
                return _download_gguf(of_gguf[1], of_gguf[2], progress)
            check(_download(name_or_dir, _DESCRIPTION, progress))
            return _download(name_or_dir, [*_DESCRIPTION, _WEIGHTS], progress)
    except HFValidationError:
        raise CheckpointError(
            f"{name_or_dir}: no such file or folder, and not a Hugging Face hub id (owner/name)"
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{name_or_dir}: no such file or folder, and no such model on the Hugging Face hub (a private one needs "
            "HF_TOKEN)"
        ) from None
    except (HTTPError, OSError) as error:  # base classes of all errors of a download
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if reason.startswith(_UNREACHABLE):
            reason = f"{reason.removeprefix(_UNREACHABLE)}; check the network and HF_ENDPOINT, or pass a folder"
        raise CheckpointError(
            f"{name_or_dir}: no such file or folder, and cannot be fetched from the Hugging Face hub: {reason}"
        ) from error


def _download_gguf(name: str, kind: str, progress: Callable[[str], None]) -> Path:
    """Downloads the one GGUF file of a repository with a name for a type, or the files of a split.

    Returns: the file, or the first of the split.
    Raises: CheckpointError: there is none, or several.
    """
    of_any_case = "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in kind)
    patterns = [f"*[-.]{of_any_case}{end}.gguf" for end in ("", "-00001-of-?????")]
    folder = _download(name, [patterns[0], f"*[-.]{of_any_case}-?????-of-?????.gguf"], progress)
    files = [path for pattern in patterns for path in sorted(folder.rglob(pattern))]
    files = [path for path in files if not path.name.startswith(_OF_IMAGES)]
    if len(files) != 1:
        found = f"{len(files)} files: {', '.join(path.name for path in files[:5])}" if files else "none"
        raise CheckpointError(
            f"{name}:{kind}: expected one GGUF file with {kind} at the end of its name, found {found}"
        )
    return files[0]


def _download(name: str, patterns: list[str], progress: Callable[[str], None]) -> Path:
    return Path(snapshot_download(name, allow_patterns=patterns, tqdm_class=_bar(progress)))


def _bar(progress: Callable[[str], None]) -> type["tqdm[Any]"]:
    """Returns a progress bar class for the hub library, which reports downloaded bytes and draws nothing."""

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, name: str = "", **kwargs: Any) -> None:  # noqa: ARG002 - the hub library passes `name`
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": False})

        def __del__(self) -> None:
            """Does nothing; tqdm would report progress again after a failed download."""

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B" and self.total:
                share = 100 * self.n // self.total
                progress(f"fetching the model {share:.0f} % ({self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB)")

    return Bar
