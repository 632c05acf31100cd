"""Tokenizer files in, ids out: special tokens once, chat through the template, the event loop left free."""

import asyncio
import hashlib
import json
import struct
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from chairlift.service.engine_protocol import tokenizer_sha256
from frontend.text.tokenizer import Tokenizer, read_folder

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def backend():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.add_special_tokens(["</end>"])
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    return tokenizer


@pytest.fixture
def files(backend):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture
def tokenizer(files):
    tokenizer = Tokenizer(files)
    yield tokenizer
    tokenizer.close()


async def test_plain_prompt_gets_the_special_tokens_of_the_post_processor(tokenizer, backend):
    ids = await tokenizer.encode("the fox")
    assert ids[0] == backend.token_to_id("<s>")
    assert backend.decode(ids) == "the fox"
    assert await tokenizer.encode("") == [backend.token_to_id("<s>")]


async def test_words_get_no_special_tokens(tokenizer, backend):
    (ids,) = await tokenizer.encode_words([" fox"])
    assert backend.decode(list(ids), skip_special_tokens=False) == " fox"


async def test_truncation_and_padding_saved_in_the_file_are_off(tokenizer):
    assert len(await tokenizer.encode("x" * 100)) == 101
    assert len(await tokenizer.encode("x")) == 2


async def test_rendered_conversation_has_exactly_the_templates_special_tokens(tokenizer, backend):
    ids = await tokenizer.encode("<s>[user] the dog", add_special_tokens=False)
    assert backend.decode(ids, skip_special_tokens=False) == "<s>[user] the dog"
    assert ids.count(backend.token_to_id("<s>")) == 1


def test_special_tokens_are_those_that_answers_do_not_show(files, backend):
    more = tokenizers.Tokenizer.from_str(backend.to_str())
    more.add_tokens(["<tool_call>"])  # an added token, not a special one
    tokenizer = Tokenizer({**files, "tokenizer.json": more.to_str().encode()})
    assert tokenizer.special_tokens == {"<s>", "</s>", "</end>"}
    ids = [more.token_to_id(token) for token in [*tokenizer.special_tokens, "<tool_call>"]]
    detokenizer = tokenizer.detokenizer(keep_special_tokens=False)
    assert detokenizer.push(ids) + detokenizer.finish() == "<tool_call>"
    tokenizer.close()


async def test_event_loop_runs_while_a_long_prompt_is_tokenized(tokenizer, monkeypatch):
    """The library's `encode` keeps the GIL: while it runs, the loop has no turn."""
    turns, during = 0, []

    class Watched:
        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            method = getattr(self._backend, name)

            def call(*args, **options):
                before = turns
                result = method(*args, **options)
                during.append(turns - before)
                return result

            return call

    monkeypatch.setattr(tokenizer, "_backend", Watched(tokenizer._backend))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread keeps the GIL until it releases it
    try:
        while not any(during):  # a busy machine may give the loop no turn; code that keeps the GIL never does
            task = asyncio.ensure_future(tokenizer.encode("a fox and 7 dogs, " * 8_000))
            while not task.done():
                await asyncio.sleep(0)
                turns += 1
    finally:
        sys.setswitchinterval(interval_s)


async def test_panic_of_the_library_is_an_ordinary_error(files):
    content = json.loads(files["tokenizer.json"])
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
    odd = {**content, "post_processor": {**template, "special_tokens": {}}}
    tokenizer = Tokenizer({"tokenizer.json": json.dumps(odd).encode()})
    with pytest.raises(RuntimeError, match="the tokenizer fails"):
        await tokenizer.encode("a")
    tokenizer.close()
    nothing = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}  # fails for a token without text
    for part in (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/w=="}},
        {"decoder": {"type": "Sequence", "decoders": [nothing, strip]}},
    ):
        with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
            Tokenizer({"tokenizer.json": json.dumps({**content, **part}).encode()})


def test_only_known_files_of_a_folder_are_read(tmp_path, files):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not a tokenizer's")
    tokenizer = Tokenizer(read_folder(tmp_path))
    assert tokenizer.sha256 == tokenizer_sha256(files)
    assert tokenizer.has_chat_template
    tokenizer.close()


def test_sha256_is_over_names_lengths_and_data_in_order_of_names():
    files = {"b.json": b"second", "a.json": b""}
    spelled_out = b"a.json\0" + struct.pack("<Q", 0) + b"b.json\0" + struct.pack("<Q", 6) + b"second"
    assert tokenizer_sha256(files) == hashlib.sha256(spelled_out).digest()


def test_vocab_size_covers_added_tokens(tokenizer, backend):
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"</end>"


def test_detokenizer_and_token_bytes_belong_to_the_vocabulary(tokenizer, backend):
    ids = [backend.token_to_id(token) for token in ("t", "he", "Ġfo", "x")]
    detokenizer = tokenizer.detokenizer(keep_special_tokens=False)
    assert detokenizer.push(ids) + detokenizer.finish() == backend.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == backend.decode(ids).encode()


def test_huge_token_ids_are_refused(files):
    content = json.loads(files["tokenizer.json"])
    content["model"]["vocab"]["odd"] = 4_000_000_000
    with pytest.raises(ValueError, match=r"tokenizer\.json has the token id 4000000000, the largest is 16777215"):
        Tokenizer({"tokenizer.json": json.dumps(content).encode()})


def test_missing_or_broken_tokenizer_json_is_named():
    with pytest.raises(ValueError, match=r"no tokenizer\.json, only: tokenizer_config\.json"):
        Tokenizer({"tokenizer_config.json": b"{}"})
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer({"tokenizer.json": b"{}"})
