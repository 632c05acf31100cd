"""A tokenizer from the metadata of a GGUF file is the one that transformers has."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from engine.bench.gguf_writer import metadata_of, write_gguf
from engine.errors import CheckpointError
from engine.model.gguf_file import read_gguf_header
from engine.model.gguf_tokenizer import tokenizer_files
from engine.model.tokenizer_files import TokenizerFiles
from tests.support.pair import DEMO_MODEL

TEXTS = (
    "Once upon a time, there was a brave fox.  It's 12345 years old!\n\n\tYes\r\n  ",
    "Grüße, Ⅷ ½ ٣٤٥ 東京 e\u0301 don't DON'T I'LL <|user|>x<|end|>",
    "",
)


def files_of(path: Path, changes: dict[str, Any] | None = None) -> dict[str, bytes]:
    """The files of the demo model's tokenizer, with other metadata; those that are None are left out."""
    metadata = {key: value for key, value in (metadata_of(DEMO_MODEL) | (changes or {})).items() if value is not None}
    write_gguf(path / "model.gguf", metadata, {})
    return tokenizer_files(read_gguf_header(path / "model.gguf"))


def tokenizer(path: Path, changes: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_buffer(files_of(path, changes)["tokenizer.json"])


def test_the_tokenizer_of_the_demo_model_is_restored(tmp_path: Path) -> None:
    found = files_of(tmp_path)
    original = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    assert json.loads(found["tokenizer.json"]) == original
    config = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text())
    names = ("eos_token", "pad_token", "chat_template")
    assert json.loads(found["tokenizer_config.json"]) == {name: config[name] for name in names}
    served = dict(TokenizerFiles.from_dir(tmp_path / "model.gguf").files)
    assert json.loads(served["tokenizer.json"]) == original


def test_words_are_those_of_the_classes_of_transformers(tmp_path: Path) -> None:
    for pre, made in (
        ("qwen2", transformers.Qwen2Tokenizer(vocab={"a": 0}, merges=[])),
        ("qwen35", transformers.Qwen3_5Tokenizer(vocab={"a": 0}, merges=[])),
        ("gpt-2", transformers.GPT2Tokenizer(vocab={"a": 0}, merges=[])),
        ("command-r", transformers.CohereTokenizer(vocab={"a": 0}, merges=[])),
    ):
        expected = json.loads(made.backend_tokenizer.to_str())
        found = json.loads(files_of(tmp_path, {"tokenizer.ggml.pre": pre})["tokenizer.json"])
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            assert found[part] == expected[part], (pre, part)
    pattern = inspect.signature(TikTokenConverter).parameters["pattern"].default
    for pre in ("llama-bpe", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"):
        found = json.loads(files_of(tmp_path, {"tokenizer.ggml.pre": pre})["tokenizer.json"])
        assert found["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": pattern}
        assert found["model"]["ignore_merges"] == (pre == "llama-bpe")


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["Don", "'t", "Ġ1234", "Ġ", "Ġx"]),
        ("llama-bpe", ["Don", "'t", "Ġ", "123", "4", "Ġ", "Ġx"]),
        ("qwen2", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("qwen35", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("smollm", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("refact", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("tekken", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("command-r", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("seed-coder", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("hunyuan-dense", ["Don", "'t", "Ġ", "123", "4", "Ġ", "Ġx"]),
        ("phi-2", ["Don", "'t", "Ġ1234", "Ġ", "Ġx"]),
        ("gigachat", ["Don", "'t", "Ġ1234", "Ġ", "Ġx"]),
        ("falcon-h1", ["Don", "'t", "Ġ", "123", "4", "Ġ", "Ġx"]),
        ("stablelm2", ["Don", "'t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("deepseek-llm", ["Don", "'", "t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("kimi-k2", ["Don't", "Ġ", "123", "4", "Ġ", "Ġx"]),
        ("youtu", ["Don't", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("gpt-4o", ["Don't", "Ġ", "123", "4", "Ġ", "Ġx"]),
        ("deepseek-coder", ["Don", "'", "t", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("default", ["Don", "'", "t", "Ġ", "123", "4", "Ġ", "Ġx"]),
    ],
)
def test_words_of_a_text(tmp_path: Path, pre: str, words: list[str]) -> None:
    made = tokenizer(tmp_path, {"tokenizer.ggml.pre": pre})
    assert [word for word, _ in made.pre_tokenizer.pre_tokenize_str("Don't 1234  x")] == words
    for text in TEXTS:
        assert made.decode(made.encode(text).ids, skip_special_tokens=False) == (
            made.normalizer.normalize_str(text) if made.normalizer else text
        )


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("falcon-h1", ["aÀ漢字b", "/\n"]),
        ("deepseek-llm", ["a", "À", "漢字", "b", "/", "\n"]),
        ("kimi-k2", ["a", "À", "漢字", "b", "/\n"]),
        ("youtu", ["a", "À", "漢字", "b", "/\n"]),
    ],
)
def test_ideographs_may_be_words_of_their_own(tmp_path: Path, pre: str, words: list[str]) -> None:
    """DeepSeek's marks are a range with letters, and split words once more, as in its own tokenizer."""
    text = "aÀ漢字b/\n"
    made = tokenizer(tmp_path, {"tokenizer.ggml.pre": pre})
    assert [text[start:stop] for _, (start, stop) in made.pre_tokenizer.pre_tokenize_str(text)] == words


@pytest.mark.parametrize("pre", ["tekken", "gpt-4o"])
def test_words_of_o200k_begin_with_capitals(tmp_path: Path, pre: str) -> None:
    made = tokenizer(tmp_path, {"tokenizer.ggml.pre": pre})
    words = made.pre_tokenizer.pre_tokenize_str("HTTPServer getName ÀB/\n")
    assert [word for word, _ in words] == ["HTTPServer", "Ġget", "Name", "ĠÃĢB", "/Ċ"]


def test_a_word_that_is_a_token_is_not_merged_with_llama_3(tmp_path: Path) -> None:
    tokens = ["a", "b", "c", "ab", "abc"]
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 5,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.padding_token_id": None,
        "tokenizer.ggml.eos_token_id": None,
    }
    assert tokenizer(tmp_path, metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("abc").ids == [4]
    assert tokenizer(tmp_path, metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("abc").ids == [3, 2]


@pytest.mark.parametrize(
    ("pre", "flags", "adds"),
    [
        ("llama-bpe", {}, (True, False)),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, (False, False)),
        ("gpt-2", {}, (False, False)),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, (True, True)),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(
    tmp_path: Path, pre: str, flags: dict[str, bool], adds: tuple[bool, bool]
) -> None:
    ids = {"tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.add_bos_token": None}
    made = tokenizer(tmp_path, ids | {"tokenizer.ggml.pre": pre} | flags)
    plain = made.encode("a fox", add_special_tokens=False).ids
    assert made.encode("a fox").ids == [2] * adds[0] + plain + [1] * adds[1]


def test_tokens_of_users_are_whole_and_shown_and_unused_ones_are_left_out(tmp_path: Path) -> None:
    kinds = metadata_of(DEMO_MODEL)["tokenizer.ggml.token_type"]
    tokens = metadata_of(DEMO_MODEL)["tokenizer.ggml.tokens"]
    metadata = {
        "tokenizer.ggml.tokens": [*tokens, "<tool>", "[PAD]", "[PAD]"],
        "tokenizer.ggml.token_type": [*kinds, 4, 5, 5],
    }
    made = tokenizer(tmp_path, metadata)
    assert made.encode("a<tool>").ids[-1] == len(tokens)
    assert made.decode([len(tokens)]) == "<tool>"
    assert made.get_vocab_size() == len(tokens) + 1


def test_named_templates_are_kept(tmp_path: Path) -> None:
    found = files_of(tmp_path, {"tokenizer.chat_template.tool_use": "tools"})
    default = metadata_of(DEMO_MODEL)["tokenizer.chat_template"]
    assert json.loads(found["tokenizer_config.json"])["chat_template"] == [
        {"name": "default", "template": default},
        {"name": "tool_use", "template": "tools"},
    ]
    found = files_of(tmp_path, {"tokenizer.chat_template": None})
    assert "chat_template" not in json.loads(found["tokenizer_config.json"])


def test_defaults_of_sampling_are_those_of_a_folder(tmp_path: Path) -> None:
    assert "generation_config.json" not in files_of(tmp_path)
    sampling = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "penalty_repeat": 1.05, "mirostat": 2}
    found = files_of(tmp_path, {f"general.sampling.{key}": value for key, value in sampling.items()})
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
    assert json.loads(found["generation_config.json"]) == expected
    found = files_of(tmp_path, {"general.sampling.temp": float("nan"), "general.sampling.top_k": "many"})
    assert "generation_config.json" not in found, "neither is a number"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5', supported are 'gpt2' .* 'llama' and 'gemma4'"),
        (
            {"tokenizer.ggml.pre": None},
            "tokenizer.ggml.pre is 'absent', supported are default, gpt-2, ",
        ),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre is 'viking', supported are default, "),
        ({"tokenizer.ggml.pre": 3}, "tokenizer.ggml.pre is 3, supported"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a"]}, "token_type has 3072 entries, tokenizer.ggml.tokens has 1"),
        ({"tokenizer.ggml.merges": ["Ġ a", "Ġ  t"]}, "tokenizer.ggml.merges has 'Ġ  t' at 1, expected two tokens"),
        ({"tokenizer.ggml.merges": ["Ġ <|pad|>"]}, r"merges has 'Ġ <\|pad\|>' at 0, expected two tokens"),
        ({"tokenizer.ggml.eos_token_id": 3072}, "eos_token_id is 3072, tokenizer.ggml.tokens has 3072 tokens"),
        ({"tokenizer.ggml.eos_token_id": -1}, "tokenizer.ggml.eos_token_id is -1, expected an integer >= 0"),
        ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1, expected true or false"),
        ({"tokenizer.chat_template": 1}, "tokenizer.chat_template is 1, expected a template"),
    ],
)
def test_malformed_metadata_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        files_of(tmp_path, changes)


def test_a_token_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    tokens = metadata_of(DEMO_MODEL)["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens has 'a' twice, at .* and 3071"):
        files_of(tmp_path, {"tokenizer.ggml.tokens": [*tokens[:-1], "a"]})
