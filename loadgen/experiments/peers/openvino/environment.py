"""A virtual environment with openvino-genai, made once per set of versions and kept in the user's cache folder.

Its own, because optimum-intel wants a `transformers` older than ours. torchvision, which optimum-intel asks for, is
taken out again: it is not needed for text, and a build that does not fit the installed torch breaks every import of
`transformers`.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from chairlift.bench.benchmark import BenchmarkError

REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
_UNWANTED = "torchvision"
_FINISHED = "finished"  # written last: an environment without it was left half made
_INSTALL_TIMEOUT_S = 3600.0
_CONVERT_TIMEOUT_S = 1800.0


def openvino_python(progress: Callable[[str], None]) -> Path:
    """The interpreter of the environment, which is made if it is not there: some minutes and 2 GB.

    Raises: BenchmarkError: it cannot be made; with the last lines of pip.
    """
    requirements = (*REQUIREMENTS, f"torch=={_public_version('torch')}")
    digest = hashlib.sha256("\n".join((sys.version, *requirements)).encode()).hexdigest()[:12]
    folder = cache_dir() / f"openvino-{digest}"
    python = folder / "bin" / "python"
    if (folder / _FINISHED).is_file():
        return python
    progress(f"making an environment with {', '.join(requirements)} in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        venv.create(folder, with_pip=True)
    except (OSError, subprocess.CalledProcessError) as error:  # no room, or a Python without ensurepip
        raise BenchmarkError(f"no virtual environment in {folder}: {error}") from error
    _run([python, "-m", "pip", "install", "--quiet", *requirements], _INSTALL_TIMEOUT_S)
    _run([python, "-m", "pip", "uninstall", "--quiet", "--yes", _UNWANTED], _INSTALL_TIMEOUT_S)
    (folder / _FINISHED).write_text("\n".join(requirements) + "\n")
    return python


def convert_checkpoint(python: Path, model_dir: Path, out: Path, weight_format: str) -> Path:
    """Converts a checkpoint saved by `transformers`, tokenizer included.

    Args:
        python: of the environment.
        model_dir: the checkpoint.
        out: a folder to make.
        weight_format: "fp32" or "int8"; the latter is the converter's own choice of per-channel weights.
    Returns: out.
    Raises: BenchmarkError: the converter fails; with its last lines.
    """
    options = ("--model", model_dir, "--task", "text-generation-with-past", "--weight-format", weight_format)
    _run([python.with_name("optimum-cli"), "export", "openvino", *options, out], _CONVERT_TIMEOUT_S)
    return out


def cache_dir() -> Path:
    """Where this project keeps what is dear to make: $XDG_CACHE_HOME/chairlift, else ~/.cache/chairlift."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "chairlift"


def _public_version(package: str) -> str:
    """Without the local part ("+cpu"): only some indexes have it."""
    return version(package).partition("+")[0]


def _run(command: Sequence[str | Path], timeout_s: float) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_s,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},  # everything the converter needs is in the folder
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"{' '.join(map(str, command))}: no end after {timeout_s:g} s") from error
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-15:])
        raise BenchmarkError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{last}")
