"""A SentencePiece vocabulary in a GGUF file gives the ids and texts of SentencePiece itself.

sentencepiece.json has two vocabularies that the package `sentencepiece` 0.2.3 trained on the pages of docs/ (BPE, with
byte fallback), in the form in which llama.cpp's converter writes them, and the ids and texts that the package gives.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.bench.gguf_writer import write_gguf
from engine.errors import CheckpointError
from engine.model.gguf_file import read_gguf_header
from engine.model.gguf_tokenizer import end_token_ids, tokenizer_files
from engine.model.tokenizer_files import TokenizerFiles

TRAINED = json.loads(Path(__file__).with_name("sentencepiece.json").read_text())


def metadata(name: str = "with a space before") -> dict[str, Any]:
    trained = TRAINED[name]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": trained["tokens"],
        "tokenizer.ggml.scores": trained["scores"],
        "tokenizer.ggml.token_type": trained["types"],
        "tokenizer.ggml.add_space_prefix": name == "with a space before",
    }


def small(tokens: dict[str, tuple[float, int]], **more: Any) -> dict[str, Any]:
    """A vocabulary of tokens with their scores and types."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens],
        "tokenizer.ggml.scores": [score for score, _ in tokens.values()],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens.values()],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    } | more


def files_of(folder: Path, values: dict[str, Any]) -> dict[str, bytes]:
    write_gguf(folder / "model.gguf", {key: value for key, value in values.items() if value is not None}, {})
    return tokenizer_files(read_gguf_header(folder / "model.gguf"))


def tokenizer(folder: Path, values: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_buffer(files_of(folder, values)["tokenizer.json"])


@pytest.mark.parametrize("name", TRAINED)
def test_ids_and_texts_are_those_of_sentencepiece(tmp_path: Path, name: str) -> None:
    made = tokenizer(tmp_path, metadata(name))
    for text, ids, decoded in TRAINED[name]["texts"]:
        assert made.encode(text, add_special_tokens=False).ids == ids, text
        assert made.decode(ids) == decoded


def test_merges_of_a_file_take_the_place_of_scores(tmp_path: Path) -> None:
    """As in files of Gemma 4, whose tokens `<turn|>` and `<|tool_response>` end an answer."""
    name = next(name for name in TRAINED if name != "with a space before")
    by_score = json.loads(files_of(tmp_path, metadata(name))["tokenizer.json"])
    values = {
        **metadata(name),
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.scores": None,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in by_score["model"]["merges"]],
    }
    made = tokenizer(tmp_path, values)
    for text, ids, decoded in TRAINED[name]["texts"]:
        assert made.encode(text, add_special_tokens=False).ids == ids, text
        assert made.decode(ids) == decoded
    added = {"tokens": ["<turn|>", "<|tool_response>"], "token_type": [3, 4]}
    more = {f"tokenizer.ggml.{key}": values[f"tokenizer.ggml.{key}"] + value for key, value in added.items()}
    write_gguf(tmp_path / "more.gguf", {key: value for key, value in (values | more).items() if value is not None}, {})
    count = len(values["tokenizer.ggml.tokens"])
    assert {count, count + 1} <= {*end_token_ids(read_gguf_header(tmp_path / "more.gguf"))}


def test_a_served_tokenizer_is_complete(tmp_path: Path) -> None:
    files = files_of(tmp_path, metadata())
    served = dict(TokenizerFiles.from_dir(tmp_path / "model.gguf").files)
    assert served == files
    names = json.loads(served["tokenizer_config.json"])
    assert names == {"bos_token": "<s>", "unk_token": "<unk>"}, "those of SentencePiece where the file names none"


def test_prompts_begin_with_bos_unless_the_file_says_something_else(tmp_path: Path) -> None:
    for flags, ends in (
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_eos_token": True, "eos_token_id": 2}, ([1], [2])),
        ({"bos_token_id": 2}, ([2], [])),
    ):
        made = tokenizer(tmp_path, metadata() | {f"tokenizer.ggml.{key}": value for key, value in flags.items()})
        plain = made.encode("a text", add_special_tokens=False).ids
        assert made.encode("a text").ids == ends[0] + plain + ends[1]


def test_special_tokens_are_whole_and_the_text_after_them_gets_a_space(tmp_path: Path) -> None:
    made = tokenizer(tmp_path, metadata())
    text = made.encode("the", add_special_tokens=False).ids
    assert made.encode("<s>the</s>the", add_special_tokens=False).ids == [1, *text, 2, *text]
    assert made.decode([1, *text, 2]) == "the"


def test_the_best_score_is_merged_first_whatever_the_order_of_tokens(tmp_path: Path) -> None:
    letters = dict.fromkeys("abc", (0.0, 1))
    assert tokenizer(tmp_path, small({**letters, "ab": (-1.0, 1), "bc": (-2.0, 1)})).encode("abc").tokens == ["ab", "c"]
    assert tokenizer(tmp_path, small({**letters, "ab": (-2.0, 1), "bc": (-1.0, 1)})).encode("abc").tokens == ["a", "bc"]


def test_equal_scores_are_merged_in_the_order_of_tokens(tmp_path: Path) -> None:
    """Files that were converted without the scores have the same one for all."""
    letters = dict.fromkeys("abc", (-1000.0, 1))
    made = tokenizer(tmp_path, small({**letters, "bc": (-1000.0, 1), "ab": (-1000.0, 1)}))
    assert made.encode("abc").tokens == ["a", "bc"]


def test_text_never_merges_to_control_or_byte_tokens(tmp_path: Path) -> None:
    tokens = {"<": (0.0, 1), "s": (0.0, 1), ">": (0.0, 1), "s>": (-1.0, 1), "<s": (-2.0, 6), "<s>": (0.0, 5)}
    assert tokenizer(tmp_path, small(tokens)).encode("<s>").tokens == ["<", "s>"]


def test_characters_without_a_token_become_bytes_or_the_unknown_token(tmp_path: Path) -> None:
    tokens = {"<unk>": (0.0, 2), "<0xC3>": (0.0, 6), "<0xA9>": (0.0, 6), "a": (0.0, 1)}
    made = tokenizer(tmp_path, small(tokens))
    assert made.encode("aéññ").ids == [3, 1, 2, 0], "é is two bytes; ñ has one without a token"
    assert made.decode([3, 1, 2]) == "aé"


def test_tokens_of_users_are_whole_words(tmp_path: Path) -> None:
    tokens = dict.fromkeys("atol", (0.0, 1)) | {"<tool>": (-1000.0, 4), "▁": (0.0, 1)}
    made = tokenizer(tmp_path, small(tokens, **{"tokenizer.ggml.add_space_prefix": True}))
    assert made.encode("a<tool>").tokens == ["▁", "a", "<tool>"]
    assert made.decode(made.encode("a<tool>").ids) == "a<tool>"


def test_special_tokens_of_phi_3_take_the_white_space_behind_them(tmp_path: Path) -> None:
    tokens = {"a": (0.0, 1), "▁": (0.0, 1), "<0x0A>": (0.0, 6), "<|user|>": (-1000.0, 3), "<s>": (0.0, 3)}
    for architecture, after_user in (("phi3", []), ("llama", [1, 2])):
        made = tokenizer(
            tmp_path,
            small(tokens, **{"general.architecture": architecture, "tokenizer.ggml.add_space_prefix": True}),
        )
        assert made.encode("<|user|>\n").ids == [3, *after_user]
        assert made.encode("<s>\n").ids == [4, 1, 2]


def test_the_end_of_a_message_of_gpt_oss_is_not_the_end_of_its_answer(tmp_path: Path) -> None:
    tokens = {"<|end|>": (0.0, 3), "<|return|>": (0.0, 3)}
    for more, expected in (({}, [0, 1]), ({"<|call|>": (0.0, 3)}, [1, 2])):
        write_gguf(tmp_path / "model.gguf", small(tokens | more), {})
        assert end_token_ids(read_gguf_header(tmp_path / "model.gguf")) == expected


@pytest.mark.parametrize("padding_id", [2**32 - 1, 620])
def test_empty_tokens_and_ids_that_no_token_has_are_left_out(tmp_path: Path, padding_id: int) -> None:
    """As in llama.cpp; files of llama2.c's converter have both (tinyllamas/stories15M)."""
    values = metadata()
    values["tokenizer.ggml.tokens"] = [*values["tokenizer.ggml.tokens"][:-3], "", "", "<x>"]
    values["tokenizer.ggml.token_type"] = [*values["tokenizer.ggml.token_type"][:-3], 1, 3, 3]
    ids = {"padding": padding_id, "eot": 2**32 - 1, "unknown": 2**32 - 1}
    values |= {f"tokenizer.ggml.{key}_token_id": token_id for key, token_id in ids.items()}
    files = files_of(tmp_path, values)
    made = Tokenizer.from_buffer(files["tokenizer.json"])
    assert (made.token_to_id("<x>"), made.token_to_id("")) == (619, None)
    assert json.loads(files["tokenizer_config.json"])["unk_token"] == "<unk>"
    assert "pad_token" not in json.loads(files["tokenizer_config.json"])
    assert end_token_ids(read_gguf_header(tmp_path / "model.gguf")) == [2]
    assert TokenizerFiles.from_dir(tmp_path / "model.gguf").files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scores": None}, "tokenizer.ggml.scores is missing"),
        ({"scores": ["a"]}, "tokenizer.ggml.scores is an array of 1 values of another type, expected numbers"),
        ({"scores": [0.0, 1.0]}, "tokenizer.ggml.scores has 2 entries, tokenizer.ggml.tokens has 620"),
        ({"scores": [math.nan] * 620}, "tokenizer.ggml.scores has nan at 0, expected numbers"),
        ({"scores": [0.0] * 619 + [-math.inf]}, "tokenizer.ggml.scores has -inf at 619, expected numbers"),
        ({"token_type": [1]}, "token_type has 1 entries, tokenizer.ggml.tokens has 620"),
        ({"tokens": ["a"] * 620}, "tokenizer.ggml.tokens has 'a' twice, at 0 and 1"),
        ({"tokens": [*map(str, range(619)), "x" * 129]}, "has 1209 characters, and 129 in one token; the maxima are"),
        ({"unknown_token_id": 620}, "unknown_token_id is 620, tokenizer.ggml.tokens has 620 tokens"),
        ({"add_space_prefix": 1}, "tokenizer.ggml.add_space_prefix is 1, expected true or false"),
    ],
)
def test_malformed_metadata_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    values = metadata() | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    with pytest.raises(CheckpointError, match=words):
        files_of(tmp_path, values)
