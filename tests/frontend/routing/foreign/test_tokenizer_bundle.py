"""Archives of tokenizers, also hostile ones."""

import hashlib
import io
import json
import struct
import zipfile
from types import SimpleNamespace

import pytest

from frontend.errors import ConfigError
from frontend.routing.foreign import tokenizer_bundle
from frontend.routing.foreign.tokenizer_bundle import fetch_archive, tokenizer_files
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files


def archive(files):
    bundle = io.BytesIO()
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as writer:
        for name, data in files.items():
            writer.writestr(name, data)
    return bundle.getvalue()


async def chunks(*data, sha256=""):
    for number, one in enumerate(data):
        yield SimpleNamespace(data=one, sha256=sha256 if number == len(data) - 1 else "")


def test_only_tokenizer_files_are_read():
    own = byte_tokenizer_files() | {"additional_chat_templates/a.jinja": b"x"}
    other = {"../evil": b"x", "config.json": b"{}", "additional_chat_templates/../b.jinja": b"x", "vocab.json": b"{}"}
    files, end_token_ids = tokenizer_files(archive(own | other))
    assert files == own
    assert end_token_ids == (END_TOKEN_ID,)  # of the tokenizer's configuration


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 3}, {}, (3,)),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 7}, (3, 5, 7)),
        ({"eos_token_id": True}, [], (END_TOKEN_ID,)),
    ],
)
def test_end_tokens_are_those_of_model_and_generation(config, generation, expected):
    files = {"config.json": json.dumps(config).encode(), "generation_config.json": json.dumps(generation).encode()}
    assert tokenizer_files(archive(byte_tokenizer_files() | files))[1] == expected


async def test_chunks_are_joined_and_compared_with_the_digest():
    digest = hashlib.sha256(b"abcd").hexdigest()
    assert await fetch_archive(chunks(b"ab", b"cd", sha256=digest)) == b"abcd"
    with pytest.raises(ConfigError, match="does not have the SHA-256"):
        await fetch_archive(chunks(b"ab", b"ce", sha256=digest))


async def test_endless_archives_end(monkeypatch):
    monkeypatch.setattr(tokenizer_bundle, "MAX_FILES_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        await fetch_archive(chunks(*[b"x" * 100] * 11))


def test_a_file_that_unpacks_to_more_than_is_allowed_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(tokenizer_bundle, "MAX_FILES_BYTES", 1000)
    with pytest.raises(ConfigError, match="more than 1000 bytes"):
        tokenizer_files(archive({"tokenizer.json": b" " * 1_000_000}))


def test_a_file_that_lies_about_its_size_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizer_bundle, "MAX_FILES_BYTES", 1000)
    data = bytearray(archive({"tokenizer.json": b" " * 1_000_000}))
    for start in range(len(data) - 4):
        if data[start : start + 4] == struct.pack("<I", 1_000_000):
            data[start : start + 4] = struct.pack("<I", 10)
    with pytest.raises(ConfigError, match="cannot be read"):
        tokenizer_files(bytes(data))


@pytest.mark.parametrize(
    "data",
    [b"", b"PK", b"not an archive", archive({"tokenizer.json": b"{}"})[:-30]],
    ids=["empty", "first bytes", "other bytes", "cut off"],  # an archive holds the time: no name for a test
)
def test_broken_archives_are_refused(data):
    with pytest.raises(ConfigError, match="cannot be read"):
        tokenizer_files(data)
