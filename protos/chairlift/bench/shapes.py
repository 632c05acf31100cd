"""Models by shape: speed depends on the shape alone, so weights are random.

A shape becomes a folder with config.json and a tokenizer, enough for an engine with `--load-format dummy`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of config.json that set a model's size."""

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    max_position_embeddings: int = 4096

    def config(self) -> dict[str, object]:
        """config.json."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": None,
            "dtype": "float32",
        }

    @property
    def num_body_weights(self) -> int:
        """Weights of the matrices inside the layers."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_attention_heads + self.num_key_value_heads)
        return self.num_hidden_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights of the output matrix."""
        return self.vocab_size * self.hidden_size


_LLAMA = ("LlamaForCausalLM", "llama")

# "135M" is SmolLM2-135M's shape, "0.6B" Qwen3-0.6B's, "1.2B" Llama-3.2-1B's; "tiny" is for `--quick` and tests.
SHAPES: Mapping[str, Shape] = {
    "tiny": Shape(*_LLAMA, 512, 64, 128, 2, 4, 2, 16),
    "15M": Shape(*_LLAMA, 32_000, 288, 768, 6, 6, 6, 48),
    "135M": Shape(*_LLAMA, 49_152, 576, 1536, 30, 9, 3, 64),
    "0.6B": Shape("Qwen3ForCausalLM", "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, rope_theta=1e6),
    "1.2B": Shape(*_LLAMA, 128_256, 2048, 8192, 16, 32, 8, 64, rope_theta=5e5),
}


def write_shape(name: str, folder: Path) -> Path:
    """Writes config.json and a tokenizer: a model for `load_format="dummy"`. Returns its folder, below `folder`."""
    shape = SHAPES[name]
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(shape.config(), indent=1))
    write_tokenizer(path, shape.vocab_size)
    return path


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """A vocabulary of the words w0, w1, ...: text and ids are the same list, so that any prompt can be sent as text."""
    word_of = [f"w{token_id}" for token_id in range(vocab_size)]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "w0",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: token_id for token_id, word in enumerate(word_of)},
            "unk_token": "w0",
        },
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w0", "unk_token": "w0"}
    (path / "tokenizer_config.json").write_text(json.dumps(names))
