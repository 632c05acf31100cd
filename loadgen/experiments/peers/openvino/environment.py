"""The environment of openvino-genai, and its converter of checkpoints.

optimum-intel wants a `transformers` older than ours. torchvision, which it asks for, is taken out again: it is not
needed for text, and a build that does not fit the installed torch breaks every import of `transformers`.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from loadgen.experiments.peers.environment import Environment, run_command

REQUIREMENTS = ("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0")
_CONVERT_TIMEOUT_S = 1800.0


def openvino_python(progress: Callable[[str], None]) -> Path:
    """The interpreter of the environment, which is made if it is not there: some minutes and 2 GB.

    Raises: BenchmarkError: it cannot be made; with the last lines of pip.
    """
    requirements = (*REQUIREMENTS, f"torch=={_public_version('torch')}")
    return Environment("openvino", requirements, unwanted=("torchvision",)).make(progress)


def convert_checkpoint(python: Path, model_dir: Path, out: Path, weight_format: str) -> Path:
    """Converts a checkpoint saved by `transformers`, tokenizer included.

    Args:
        python: of the environment.
        model_dir: the checkpoint.
        out: a folder to make.
        weight_format: "fp32" or "int8", the converter's own choice of per-channel weights. It must be said: without it
            models of more than a billion parameters become int8.
    Returns: out.
    Raises: BenchmarkError: the converter fails; with its last lines.
    """
    task = ["--task", "text-generation-with-past", "--weight-format", weight_format]
    options: list[str | Path] = ["--model", model_dir, *task]
    offline = {"HF_HUB_OFFLINE": "1"}  # everything the converter needs is in the folder
    run_command([python.with_name("optimum-cli"), "export", "openvino", *options, out], _CONVERT_TIMEOUT_S, offline)
    return out


def _public_version(package: str) -> str:
    """Without the local part ("+cpu"): only some indexes have it."""
    return version(package).partition("+")[0]
