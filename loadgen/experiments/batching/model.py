"""The model of the experiment: the shape of a 15M Llama with random weights, or a checkpoint of the user's.

Speed depends on the shape alone, and both policies must give the same ids whatever the weights are.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from loadgen.errors import OptionError

_VOCABULARY = 32_000

# The same layers, widths and heads as the 15M shape of the engine's benchmarks; longer positions.
_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": _VOCABULARY,
    "hidden_size": 288,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 48,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "float32",
}


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine is to load.

    Attributes:
        title: for people.
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
        _write_shape(folder)
        flags = ("--model", str(folder), "--load-format", "dummy", "--served-model-name", "llama-15m")
        return Model("a 15M Llama with random weights, fp32", flags, int(str(_CONFIG["max_position_embeddings"])))
    try:
        max_model_len = int(json.loads((path / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(f"--model {path}: no folder with a config.json that says max_position_embeddings") from error
    return Model(f"{path.resolve().name}, as it lies there", ("--model", str(path)), max_model_len)


def _write_shape(folder: Path) -> None:
    """config.json, and a tokenizer whose words are w0, w1, ..."""
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(_VOCABULARY)}, "unk_token": "w0"},
    }
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
