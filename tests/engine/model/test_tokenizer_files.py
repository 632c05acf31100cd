"""The digest both sides compute, by hand."""

import hashlib
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.model.tokenizer_files import TokenizerFiles

TOKENIZER = '{"model": {"vocab": {"a": 0}}}'


def test_files_are_sorted_and_others_left_out(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        (tmp_path / name).write_text(TOKENIZER if name == "tokenizer.json" else "{}")
    files = TokenizerFiles.from_dir(tmp_path)
    assert [name for name, _ in files.files] == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]


def test_the_digest_covers_names_lengths_and_data(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "chat_template.jinja").write_bytes(b"")
    expected = hashlib.sha256(
        b"chat_template.jinja\0"
        + bytes(8)
        + b"tokenizer.json\0"
        + bytes([len(TOKENIZER)])
        + bytes(7)
        + TOKENIZER.encode()
    ).digest()
    assert TokenizerFiles.from_dir(tmp_path).sha256() == expected


def test_a_model_without_a_tokenizer_is_broken(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        TokenizerFiles.from_dir(tmp_path)


def test_a_model_that_needs_none_has_none_or_all(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(b"{}")
    files = TokenizerFiles.from_dir(tmp_path, is_required=False)
    assert files.files == ()
    assert files.sha256() == hashlib.sha256(b"").digest()
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    assert len(TokenizerFiles.from_dir(tmp_path, is_required=False).files) == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b'{"model": {"vocab": {"a"', b"", b"\xff\xfe"])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"/{name}: cannot be read as JSON: .*; fetch the file again"):
        TokenizerFiles.from_dir(tmp_path)


def test_half_of_a_surrogate_pair_is_refused(tmp_path: Path) -> None:
    """JSON can escape it, but no text has it; here it is in a token that is added to tokenizer.json."""
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "tokenizer_config.json").write_text(r'{"bos_token": "\ud83d"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: a text in it.* half of a surrogate pair, '\\ud83d'$"):
        TokenizerFiles.from_dir(tmp_path)
