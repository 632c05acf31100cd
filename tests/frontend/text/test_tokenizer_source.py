import os

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import tokenizer_sha256
from frontend.errors import ConfigError, TokenizerMismatch
from frontend.text.tokenizer_source import TokenizerSource
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files


class Stub:
    """GetTokenizer of an engine with these files, sent in small parts."""

    def __init__(self, files):
        self._files = files
        self.num_calls = 0

    async def GetTokenizer(self, request, timeout):
        self.num_calls += 1
        for name, data in self._files.items():
            for start in range(0, len(data), 1000):
                yield pb.GetTokenizerResponse(file_name=name, data=data[start : start + 1000])


@pytest.fixture
def files():
    return {**byte_tokenizer_files(), "generation_config.json": b'{"temperature": 0.5}'}


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda path: os.mkfifo(path), "special_tokens_map.json is not a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "special_tokens_map.json is not a regular file"),
        (lambda path: path.symlink_to(path.name), "special_tokens_map.json cannot be read: Too many levels"),
        (lambda path: path.write_bytes(b"[" * 100_000), "special_tokens_map.json is nested too deeply"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 30)), "bytes, at most 268435456 are read"),
    ],
    ids=["named pipe", "device", "circular link", "nested", "large"],
)
def test_unusable_files_in_the_folder_are_a_config_error(files, tmp_path, break_it, says):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    break_it(tmp_path / "special_tokens_map.json")
    with pytest.raises(ConfigError, match="--tokenizer") as caught:
        TokenizerSource(tmp_path)
    assert says in str(caught.value)


async def test_files_come_from_the_engine_once(files):
    source, stub = TokenizerSource(None), Stub(files)
    assert source.own_sha256 == b""
    tokenizer, defaults = await source.get(stub, tokenizer_sha256(files))
    assert (tokenizer.sha256, defaults["temperature"]) == (tokenizer_sha256(files), 0.5)
    assert await source.get(stub, tokenizer_sha256(files)) == (tokenizer, defaults)
    assert stub.num_calls == 1
    source.close()


async def test_files_with_another_hash_are_refused(files):
    with pytest.raises(TokenizerMismatch, match="announces"):
        await TokenizerSource(None).get(Stub(files), b"\0" * 32)


async def test_files_that_cannot_be_read_are_refused(files):
    files["tokenizer.json"] = b"{}"
    with pytest.raises(TokenizerMismatch, match="cannot be read here"):
        await TokenizerSource(None).get(Stub(files), tokenizer_sha256(files))


async def test_tokenizer_of_another_model_is_fetched_and_the_old_one_still_works(files):
    source = TokenizerSource(None)
    old, _ = await source.get(Stub(files), tokenizer_sha256(files))
    other = {"tokenizer.json": files["tokenizer.json"]}
    new, defaults = await source.get(Stub(other), tokenizer_sha256(other))
    assert new is not old
    assert defaults["temperature"] == 1.0
    assert await old.encode("abc") == await new.encode("abc")
    source.close()
    old.close()


async def test_folder_is_used_if_its_hash_matches_the_engines(files, tmp_path):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not a tokenizer's file")
    source, stub = TokenizerSource(tmp_path), Stub(files)
    assert source.own_sha256 == tokenizer_sha256(files)
    tokenizer, defaults = await source.get(stub, tokenizer_sha256(files))
    assert (tokenizer.sha256, defaults["temperature"], stub.num_calls) == (tokenizer_sha256(files), 0.5, 0)
    with pytest.raises(TokenizerMismatch, match="leave it out to take them from the engine"):
        await source.get(stub, b"\0" * 32)
    source.close()


def test_folder_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        TokenizerSource(tmp_path)


async def test_engine_without_a_tokenizer_gets_one_without_tokens(caplog):
    source = TokenizerSource(None)
    tokenizer, defaults = await source.get(Stub({}), tokenizer_sha256({}))
    assert not tokenizer.has_tokens
    assert tokenizer.sha256 == tokenizer_sha256({})
    assert defaults["temperature"] == 1.0
    assert tokenizer.token_bytes(5) == b""
    detokenizer = tokenizer.detokenizer(keep_special_tokens=True)
    assert detokenizer.push([5, 6]) + detokenizer.finish() == ""
    assert "prompts must be token ids" in caplog.text
    source.close()


def test_unreadable_files_are_named(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"--tokenizer: .*/tokenizer\.json cannot be read: Permission denied"):
        TokenizerSource(tmp_path)


TEMPLATE = "{{ messages[0].content }} <tool_call>"


@pytest.mark.parametrize("in_folder", [True, False])
async def test_another_chat_template_replaces_the_models(files, tmp_path, in_folder):
    files["chat_template.jinja"] = b"the model's"
    folder, template = tmp_path / "model", tmp_path / "mine.jinja"
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    template.write_text(TEMPLATE)
    source = TokenizerSource(folder if in_folder else None, template)
    tokenizer, _ = await source.get(Stub(files), tokenizer_sha256(files))  # the hash is that of the model's own files
    assert (tokenizer.chat.plain, tokenizer.chat.for_tools, tokenizer.has_chat_template) == (TEMPLATE, TEMPLATE, True)
    source.close()


async def test_a_model_without_a_chat_template_gets_one(files, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    source = TokenizerSource(None, tmp_path / "mine.jinja")
    files = {"tokenizer.json": files["tokenizer.json"]}
    tokenizer, _ = await source.get(Stub(files), tokenizer_sha256(files))
    assert tokenizer.chat.refusal_of(with_tools=True) == tokenizer.chat.refusal_of(with_tools=False) == ""
    source.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is not a file"),
        (os.mkfifo, "is not a file"),
        (lambda path: path.write_bytes(b"a\xff"), "is not UTF-8: invalid start byte at byte 1"),
        (lambda path: (path.touch(), os.truncate(path, 1 << 30)), "has 1073741824 bytes, at most 1048576 are read"),
    ],
    ids=["absent", "named pipe", "not text", "large"],
)
def test_an_unusable_chat_template_is_a_config_error(tmp_path, make, says):
    make(tmp_path / "mine.jinja")
    with pytest.raises(ConfigError) as caught:
        TokenizerSource(None, tmp_path / "mine.jinja")
    assert str(caught.value) == f"--chat-template {tmp_path}/mine.jinja {says}"
