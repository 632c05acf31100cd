"""Tokenizer files in, ids out: special tokens once, chat through the template, the event loop left free."""

import asyncio
import hashlib
import json
import struct
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from frontend.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.errors import InvalidRequest
from frontend.model.tokenizer import Tokenizer, files_sha256

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
    tokenizer = Tokenizer.from_files(files)
    yield tokenizer
    tokenizer.close()


async def test_plain_prompt_gets_the_special_tokens_of_the_post_processor(tokenizer, backend):
    ids = await tokenizer.encode("the fox")
    assert ids[0] == backend.token_to_id("<s>")
    assert backend.decode(ids) == "the fox"
    assert await tokenizer.encode("") == [backend.token_to_id("<s>")]


async def test_truncation_and_padding_saved_in_the_file_are_off(tokenizer):
    assert len(await tokenizer.encode("x" * 100)) == 101
    assert len(await tokenizer.encode("x")) == 2


async def test_chat_prompt_has_exactly_the_templates_special_tokens(tokenizer, backend):
    ids = await tokenizer.encode_chat([ChatMessage("user", "the dog")])
    assert backend.decode(ids, skip_special_tokens=False) == "<s>[user] the dog"
    assert ids.count(backend.token_to_id("<s>")) == 1


async def test_chat_without_a_template_is_an_invalid_request(files):
    del files["tokenizer_config.json"]
    tokenizer = Tokenizer.from_files(files)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="has no chat template") as raised:
        await tokenizer.encode_chat([ChatMessage("user", "hello")])
    assert raised.value.field == "spec.chat"
    tokenizer.close()


async def test_refusal_of_the_template_is_an_invalid_request(files):
    files["chat_template.jinja"] = b"{{ raise_exception('only users may speak') }}"
    tokenizer = Tokenizer.from_files(files)
    with pytest.raises(InvalidRequest, match="only users may speak") as raised:
        await tokenizer.encode_chat([ChatMessage("system", "hello")], field="chat")
    assert raised.value.field == "chat"
    tokenizer.close()


async def test_broken_template_refuses_chat_and_serves_text(files, caplog):
    files["chat_template.jinja"] = b"{% if %}"
    tokenizer = Tokenizer.from_files(files)
    assert "chat prompts are refused" in caplog.text
    assert not tokenizer.has_chat_template
    assert len(await tokenizer.encode("hello")) > 1
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        await tokenizer.encode_chat([ChatMessage("user", "hello")])
    tokenizer.close()


async def test_rendered_chat_is_the_text_of_its_tokens(tokenizer, backend):
    options = ChatOptions(tools=({"name": "get"},), add_generation_prompt=False)
    text = await tokenizer.render_chat([ChatMessage("user", "the dog")], options)
    ids = await tokenizer.encode_chat([ChatMessage("user", "the dog")], options)
    assert text == backend.decode(ids, skip_special_tokens=False) == "<s>[user] the dog"


async def test_requests_with_tools_have_a_template_of_their_own_if_the_model_has_one(files):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with {{ tools | length }}"}]
    files["tokenizer_config.json"] = json.dumps({"chat_template": named}).encode()
    tokenizer = Tokenizer.from_files(files)
    question = [ChatMessage("user", "hi")]
    assert await tokenizer.render_chat(question) == "plain"
    assert await tokenizer.render_chat(question, ChatOptions(template_kwargs={"x": 1})) == "plain"
    assert await tokenizer.render_chat(question, ChatOptions(tools=({}, {}))) == "with 2"
    assert tokenizer.chat_template_source == named[1]["template"]
    tokenizer.close()


async def test_half_a_character_in_a_call_is_an_invalid_request(files):
    files["chat_template.jinja"] = b"{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    tokenizer = Tokenizer.from_files(files)
    call = ToolCall("c", "get", '{"a": "\\ud800"}')
    with pytest.raises(InvalidRequest, match="half a character"):
        await tokenizer.encode_chat([ChatMessage("assistant", tool_calls=(call,))])
    tokenizer.close()


def test_special_tokens_are_those_that_answers_do_not_show(files, backend):
    more = tokenizers.Tokenizer.from_str(backend.to_str())
    more.add_tokens(["<tool_call>"])  # an added token, not a special one
    tokenizer = Tokenizer.from_files({**files, "tokenizer.json": more.to_str().encode()})
    assert tokenizer.special_tokens == {"<s>", "</s>", "</end>"}
    ids = [more.token_to_id(token) for token in [*tokenizer.special_tokens, "<tool_call>"]]
    detokenizer = tokenizer.detokenizer(keep_special_tokens=False)
    assert detokenizer.push(ids) + detokenizer.finish() == "<tool_call>"
    tokenizer.close()


async def longest_stall(task: asyncio.Future[list[int]]) -> float:
    """The longest the event loop stood still until the task was done, as a fraction of that time."""
    start = last = time.perf_counter()
    stall = 0.0
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        stall, last = max(stall, now - last), now
    return stall / (last - start)


async def test_the_event_loop_runs_while_a_long_prompt_is_tokenized(tokenizer):
    text = "a fox and 7 dogs, " * 20_000
    # The library's `encode` stalls the loop for 90 % of the time, `encode_batch` for 4 %. The best of three, as others
    # use this machine too.
    stalls = [await longest_stall(asyncio.ensure_future(tokenizer.encode(text))) for _ in range(3)]
    assert min(stalls) < 0.5


def test_from_dir_reads_the_known_files_only(tmp_path, files):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(b"not a tokenizer's")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.sha256 == files_sha256(files)
    assert tokenizer.has_chat_template
    tokenizer.close()


def test_sha256_is_over_names_lengths_and_data_in_order_of_names():
    files = {"b.json": b"second", "a.json": b""}
    spelled_out = b"a.json\0" + struct.pack("<Q", 0) + b"b.json\0" + struct.pack("<Q", 6) + b"second"
    assert files_sha256(files) == hashlib.sha256(spelled_out).digest()


def test_vocab_size_covers_added_tokens(tokenizer, backend):
    assert tokenizer.vocab_size == backend.get_vocab_size()
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b"</end>"


def test_detokenizer_and_token_bytes_belong_to_the_vocabulary(tokenizer, backend):
    ids = [backend.token_to_id(token) for token in ("t", "he", "Ġfo", "x")]
    detokenizer = tokenizer.detokenizer(keep_special_tokens=False)
    assert detokenizer.push(ids) + detokenizer.finish() == backend.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == backend.decode(ids).encode()


def test_missing_or_broken_tokenizer_json_is_named():
    with pytest.raises(ValueError, match=r"no tokenizer\.json, only: tokenizer_config\.json"):
        Tokenizer.from_files({"tokenizer_config.json": b"{}"})
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_files({"tokenizer.json": b"{}"})


@pytest.mark.parametrize("templates", [[{"name": "default"}], [{"template": "x"}], ["x"]])
async def test_malformed_named_templates_refuse_chat_alone(files, templates):
    config = {**json.loads(files["tokenizer_config.json"]), "chat_template": templates}
    others = {name: data for name, data in files.items() if name != "chat_template.jinja"}
    tokenizer = Tokenizer.from_files({**others, "tokenizer_config.json": json.dumps(config).encode()})
    assert await tokenizer.encode("the fox")
    with pytest.raises(InvalidRequest, match="no name or no template"):
        await tokenizer.encode_chat([ChatMessage("user", "hi")])
    tokenizer.close()
