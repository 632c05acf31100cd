"""Checkpoints whose tokenizer is spread over several files: the pair makes the ids and texts that AutoTokenizer makes.

The engine completes tokenizer.json, the frontend reads what the engine serves; here both are held against the library.
"""

import json
from pathlib import Path

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from engine.errors import CheckpointError
from engine.model.tokenizer_files import TokenizerFiles
from frontend.text.chat.messages import ChatMessage, ChatOptions
from frontend.text.chat.template_turns import template_messages
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer, read_folder

TEXTS = ["", "a<plain> <spec>  <new> b", "<new><newer> <|x|>é🙂", " . a , b", "<s>a</s>"]
NEW_ID = 258
FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
ROW = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


def byte_level(*, with_bos: bool = False) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<plain>")])
    backend.add_special_tokens(["<spec>"])
    if with_bos:
        backend.post_processor = processors.TemplateProcessing(single="<spec> $A", special_tokens=[("<spec>", 257)])
    return backend


def metaspace() -> tokenizers.Tokenizer:
    vocabulary = [("<unk>", 0.0), ("▁", -1.0), *((char, -2.0) for char in "ab.,<>snewrplicx|/")]
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2 has it, and `LlamaTokenizer` builds it."""
    pieces = ["<unk>", "<s>", "</s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256)), *"ab.,<>snewrplicx|/"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], fuse_unk=True, byte_fallback=True, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture
def save(tmp_path: Path):
    """save(files) -> a folder with them, JSON and templates; a tokenizer if none is among them."""

    def write(files: dict) -> Path:
        for name, content in {"tokenizer.json": byte_level(), "config.json": {"model_type": "llama"}, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            if isinstance(content, tokenizers.Tokenizer):
                path.write_text(content.to_str())
            else:
                path.write_text(content if isinstance(content, str) else json.dumps(content))
        return tmp_path

    return write


def served(folder: Path) -> Tokenizer:
    return Tokenizer(dict(TokenizerFiles.from_dir(folder).files))


CASES = {
    "added_tokens_decoder alone": {"added_tokens_decoder": {str(NEW_ID): ROW}},
    "several, out of order": {
        "added_tokens_decoder": {"259": {**ROW, "content": "<newer>", "special": False}, "258": {**ROW, "lstrip": True}}
    },
    "other flags for a token that is there": {
        "added_tokens_decoder": {
            "256": {**ROW, "content": "<plain>", "lstrip": True},
            "257": {**ROW, "content": "<spec>", "special": False},
        }
    },
    "bos_token alone": {"bos_token": "<new>"},
    "bos_token as AddedToken": {"bos_token": {"__type": "AddedToken", **ROW, "lstrip": True}},
    "bos_token that is a plain token": {"bos_token": "<plain>"},
    "bos_token that is in the vocabulary": {"bos_token": "a"},
    "null tokens": {"bos_token": None, "eos_token": None, "pad_token": None},
    "eos and decoder": {"eos_token": "<new>", "added_tokens_decoder": {str(NEW_ID): {**ROW, "special": False}}},
    "extra_special_tokens as a list": {"extra_special_tokens": ["<new>", "<plain>"]},
    "extra_special_tokens as names": {"extra_special_tokens": {"image_token": "<new>"}},
    "additional_special_tokens": {"additional_special_tokens": ["<new>", "<newer>"]},
    "a token of the model's own": {"image_token": "<new>"},
    "a token of the model's own as AddedToken": {"image_token": {"__type": "AddedToken", **ROW}},
    "add_bos_token": {"add_bos_token": True, "bos_token": "<spec>"},
    "add_bos_token false": {"add_bos_token": False, "bos_token": "<spec>"},
    "add_eos_token": {"add_eos_token": True, "eos_token": "<spec>"},
    "add_prefix_space and legacy": {"add_prefix_space": True, "legacy": False},
    "split_special_tokens": {"split_special_tokens": True},
    "clean_up_tokenization_spaces": {"clean_up_tokenization_spaces": True},
}
OLDER = {
    "special_tokens_map.json": {
        "special_tokens_map.json": {"bos_token": {**ROW, "lstrip": True}, "eos_token": "<spec>", "unk_token": "<plain>"}
    },
    "added_tokens.json": {"added_tokens.json": {"<new>": NEW_ID, "<newer>": 259}},
    "added_tokens.json and its map": {
        "added_tokens.json": {"<new>": NEW_ID},
        "special_tokens_map.json": {"additional_special_tokens": ["<new>"]},
    },
    "map beside added_tokens_decoder": {
        "tokenizer_config.json": {**FAST, "added_tokens_decoder": {}},
        "special_tokens_map.json": {"bos_token": "<new>"},
    },
}


async def assert_equal(folder: Path, class_name: str = "TokenizersBackend") -> None:
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), served(folder)
    assert type(theirs).__name__ == class_name
    try:
        assert ours.vocab_size == len(theirs)
        for text in TEXTS:
            ids = theirs.encode(text)
            assert await ours.encode(text) == ids, text
            assert await ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), (
                text
            )
            for skip in (False, True):
                detokenizer = ours.detokenizer(keep_special_tokens=not skip)
                said = "".join([detokenizer.push([token_id]) for token_id in ids]) + detokenizer.finish()
                assert said == theirs.decode(ids, skip_special_tokens=skip), (text, skip)
        assert ours.chat.variables == theirs.special_tokens_map
    finally:
        ours.close()


@pytest.mark.parametrize("with_bos", [False, True])
@pytest.mark.parametrize("name", CASES)
async def test_ids_and_texts_with_tokenizer_config(save, name, with_bos):
    await assert_equal(
        save({"tokenizer_config.json": {**FAST, **CASES[name]}, "tokenizer.json": byte_level(with_bos=with_bos)})
    )


@pytest.mark.parametrize("name", OLDER)
async def test_ids_and_texts_of_older_checkpoints(save, name):
    await assert_equal(save({"tokenizer_config.json": FAST, **OLDER[name]}))


@pytest.mark.parametrize("name", ["added_tokens_decoder alone", "bos_token alone", "extra_special_tokens as a list"])
async def test_ids_and_texts_of_a_unigram_tokenizer(save, name):
    backend = metaspace()
    config = json.loads(json.dumps(CASES[name]).replace(f'"{NEW_ID}"', f'"{backend.get_vocab_size()}"'))
    await assert_equal(save({"tokenizer_config.json": {**FAST, **config}, "tokenizer.json": backend}))


@pytest.mark.parametrize("suffix", ["", "Fast"])
@pytest.mark.parametrize(
    "fields", [{}, {"bos_token": None}, {"eos_token": "<new>"}, {"added_tokens_decoder": {}}], ids=str
)
async def test_special_tokens_of_a_class_hold_where_no_file_names_them(save, suffix, fields):
    llama = {"tokenizer_class": f"LlamaTokenizer{suffix}", **fields}
    await assert_equal(save({"tokenizer_config.json": llama, "tokenizer.json": sentencepiece()}), "LlamaTokenizer")
    await assert_equal(save({"tokenizer_config.json": llama}))
    qwen = byte_level()
    qwen.add_special_tokens(["<|endoftext|>"])
    config = {"tokenizer_class": f"Qwen2Tokenizer{suffix}", **fields}
    files = {"tokenizer_config.json": config, "tokenizer.json": qwen, "config.json": {"model_type": "qwen2"}}
    theirs, ours = transformers.AutoTokenizer.from_pretrained(save(files)), served(save(files))
    ours.close()
    assert type(theirs).__name__ == "Qwen2Tokenizer"
    assert ours.chat.variables == theirs.special_tokens_map


def test_complete_tokenizer_is_served_byte_by_byte(save):
    folder = save({"tokenizer_config.json": {**FAST, "eos_token": "<spec>", "clean_up_tokenization_spaces": False}})
    assert dict(TokenizerFiles.from_dir(folder).files) == read_folder(folder), "--tokenizer has the same digest"


TEMPLATES = {
    "file before config": {"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "C"}},
    "file and folder": {"chat_template.jinja": "J", "additional_chat_templates/tool_use.jinja": "T"},
    "folder before config": {
        "additional_chat_templates/tool_use.jinja": "T",
        "tokenizer_config.json": {"chat_template": "C"},
    },
    "folder alone": {"additional_chat_templates/default.jinja": "D", "additional_chat_templates/tool_use.jinja": "T"},
    "folder without a default": {"additional_chat_templates/rag.jinja": "R"},
    "default in the folder": {"chat_template.jinja": "J", "additional_chat_templates/default.jinja": "D"},
    "list": {
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]
        }
    },
    "list without a default": {"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}]}},
    "object": {"tokenizer_config.json": {"chat_template": {"default": "D", "tool_use": "T"}}},
    "none": {},
    "variables": {
        "chat_template.jinja": "{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ x_token }}|{{ extra_tokens }}",
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", **ROW, "content": "<spec>"},
            "eos_token": None,
            "extra_special_tokens": {"x_token": "<plain>"},
            "image_token": "<new>",
        },
    },
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [(), ({"type": "function", "function": {"name": "f"}},)], ids=["plain", "tools"])
def test_templates_are_found_as_transformers_finds_them(save, name, tools):
    files = TEMPLATES[name]
    folder = save({**files, "tokenizer_config.json": {**FAST, **files.get("tokenizer_config.json", {})}})
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), served(folder)
    ours.close()
    messages = [ChatMessage("user", "hi")]
    source = ours.chat.for_tools if tools else ours.chat.plain
    try:
        expected = theirs.apply_chat_template(
            template_messages(messages, content_as_parts=False, text_as_parts=False),
            tools=list(tools) or None,
            tokenize=False,
        )
    except ValueError:
        assert source is None
        assert ours.chat.refusal_of(with_tools=bool(tools))
    else:
        assert source is not None
        options = ChatOptions(tools=tools, add_generation_prompt=False)
        assert ChatTemplate(source, ours.chat.variables).render(messages, options) == expected


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"300": ROW}}},
            "tokenizer_config.json: gives '<new>' the id 300, with this tokenizer.json its id is 258",
        ),
        ({"added_tokens.json": {"<new>": 400}}, "added_tokens.json: gives '<new>' the id 400"),
        (
            {
                "tokenizer_config.json": {"clean_up_tokenization_spaces": True},
                "tokenizer.json": metaspace(),
            },
            "clean_up_tokenization_spaces is true, supported is false",
        ),
        (
            {
                "tokenizer_config.json": {
                    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True
                }
            },
            "even_though_it_will_corrupt_output is true, supported is false",
        ),
        ({"tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}}, "fast_tokenizer_files is"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": ROW}}}, "added_tokens_decoder has an invalid entry"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"258": 7}}}, "added_tokens_decoder has an invalid entry"),
        ({"tokenizer_config.json": {"extra_special_tokens": 7}}, "extra_special_tokens has an invalid entry"),
        ({"tokenizer_config.json": {"bos_token": {"content": 7}}}, "a special token has an invalid entry"),
    ],
)
def test_what_would_differ_is_refused(save, files, says):
    with pytest.raises(CheckpointError, match=f"{says}".replace("(", r"\(")) as caught:
        TokenizerFiles.from_dir(save(files))
    assert "\n" not in str(caught.value)
