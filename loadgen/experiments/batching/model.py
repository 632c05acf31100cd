"""The model of the experiment: the shape of a 15M Llama with random weights, or a checkpoint.

Speed depends on the shape alone, and both policies must give the same ids whatever the weights are.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from chairlift.bench.shapes import SHAPES, write_shape
from loadgen.errors import OptionError


@dataclass(frozen=True, slots=True)
class Model:
    """The model that an engine loads.

    Attributes:
        title: in reports.
        flags: of the engine.
        max_model_len: most tokens of prompt and answer.
    """

    title: str
    flags: tuple[str, ...]
    max_model_len: int


def chosen_model(path: Path | None, folder: Path) -> Model:
    """A checkpoint, or the shape written into a folder.

    Args:
        path: of a checkpoint; None takes the shape.
        folder: for the shape's files; must exist.
    Raises: OptionError: the path holds no readable config.json.
    """
    if path is None:
        model = str(write_shape("15M", folder))
        flags = ("--model", model, "--load-format", "dummy", "--served-model-name", "llama-15m")
        return Model("a 15M Llama with random weights, fp32", flags, SHAPES["15M"].max_position_embeddings)
    try:
        max_model_len = int(json.loads((path / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--model {path}: no folder with a config.json that says max_position_embeddings") from error
    return Model(f"{path.resolve().name}, as it lies there", ("--model", str(path)), max_model_len)
