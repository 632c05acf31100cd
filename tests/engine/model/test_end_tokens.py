"""A tokenizer's `eos_token` ends answers too, wherever its files name it, with the id that transformers gives it."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken

from engine.errors import CheckpointError
from engine.model.config import ModelConfig
from engine.model.transformers_probe import TransformersConfig

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
    "eos_token_id": 2,
}
WORDS = ["<unk>", "<s>", "</s>", "a", "b", "<|im_end|>"]
NAMED: list[dict[str, Any]] = [
    {"tokenizer_config.json": {"eos_token": "<|im_end|>"}},
    {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}},
    {"special_tokens_map.json": {"eos_token": "<|im_end|>"}},
    {
        "tokenizer_config.json": {"eos_token": "</s>"},
        "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}},
    },
    {
        "tokenizer_config.json": {
            "eos_token": "<|im_end|>",
            "added_tokens_decoder": {"5": {"content": "<|im_end|>", "special": True}},
        },
        "special_tokens_map.json": {"eos_token": "</s>"},
    },
]


def models() -> dict[str, Any]:
    return {
        "words": tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"),
        "pieces": tokenizers.models.Unigram([(word, -1.0) for word in WORDS], 0, byte_fallback=False),
        "added": tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS[:-1])}, "<unk>"),
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """checkpoint(kind of tokenizer, files, **fields of config.json) -> a folder without weights."""

    def checkpoint(kind: str, files: dict[str, Any], **fields: Any) -> Path:
        tokenizer = tokenizers.Tokenizer(models()[kind])
        if kind == "added":
            tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("tokenizer_config.json", {})}
        for name, value in {**files, "tokenizer_config.json": config, "config.json": {**CONFIG, **fields}}.items():
            (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return checkpoint


@pytest.mark.parametrize("files", NAMED)
@pytest.mark.parametrize("kind", ["words", "pieces", "added"])
def test_the_token_has_the_id_that_transformers_gives_it(
    checkpoint: Callable[..., Path], kind: str, files: dict[str, Any]
) -> None:
    path = checkpoint(kind, files)
    theirs = transformers.AutoTokenizer.from_pretrained(path).eos_token_id
    assert theirs == 5
    assert ModelConfig.from_dir(path).end_token_ids == {2, theirs}


def test_both_implementations_end_at_it(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("words", NAMED[0])
    assert TransformersConfig.from_dir(path).shape.end_token_ids == {2, 5}
    (path / "generation_config.json").write_text('{"eos_token_id": 3}')
    assert TransformersConfig.from_dir(path).shape.end_token_ids == {2, 3, 5}
    assert ModelConfig.from_dir(path).end_token_ids == {2, 3, 5}


@pytest.mark.parametrize(
    "config", [{}, {"eos_token": None}, {"eos_token": 5}, {"eos_token": {"content": ["b"]}}, {"eos_token": "<none>"}]
)
def test_a_tokenizer_that_names_none_adds_none(checkpoint: Callable[..., Path], config: dict[str, Any]) -> None:
    assert ModelConfig.from_dir(checkpoint("pieces", {"tokenizer_config.json": config})).end_token_ids == {2}


def test_a_token_that_the_model_cannot_produce_ends_nothing(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("words", NAMED[0], vocab_size=5)
    assert ModelConfig.from_dir(path).end_token_ids == {2}


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_a_damaged_file_is_named(checkpoint: Callable[..., Path], name: str) -> None:
    path = checkpoint("words", NAMED[0])
    (path / name).write_text('{"model": ')
    with pytest.raises(CheckpointError, match=rf"/{name}: cannot be read as JSON"):
        ModelConfig.from_dir(path)
    (path / name).write_text('{"model": {"vocab": 5}, "added_tokens": [7], "added_tokens_decoder": []}')
    ModelConfig.from_dir(path)


def test_a_key_that_is_no_id_is_not_one(checkpoint: Callable[..., Path]) -> None:
    entry = {"content": "<|im_end|>", "special": True}
    config = {"eos_token": "<|im_end|>", "added_tokens_decoder": {"9" * 5000: entry, "x": entry}}
    path = checkpoint("words", {"tokenizer_config.json": config})
    assert ModelConfig.from_dir(path).end_token_ids == {2, 5}  # that of tokenizer.json; `complete` refuses the key


def test_a_changed_tokenizer_is_read_again(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("words", NAMED[0])
    assert ModelConfig.from_dir(path).end_token_ids == {2, 5}
    tokenizer = path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|end|>"))
    changed_ns = tokenizer.stat().st_mtime_ns + 1_000_000_000
    os.utime(tokenizer, ns=(changed_ns, changed_ns))  # whatever the file system's clock resolves
    assert ModelConfig.from_dir(path).end_token_ids == {2}
