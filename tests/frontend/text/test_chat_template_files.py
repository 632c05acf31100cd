"""Which chat templates a model's files hold, and what they may name: as transformers finds them."""

import json

import pytest

from frontend.text.chat_template_files import ChatFiles


def config_with(templates) -> dict[str, bytes]:
    return {"tokenizer_config.json": json.dumps({"chat_template": templates}).encode()}


def test_template_file_overrides_json_and_config():
    files = config_with("from config")
    assert ChatFiles.from_files(files).plain == "from config"
    files["chat_template.json"] = json.dumps({"chat_template": "from json"}).encode()
    assert ChatFiles.from_files(files).plain == "from json"
    files["chat_template.jinja"] = b"from file"
    assert ChatFiles.from_files(files).plain == "from file"
    assert "no chat template" in ChatFiles.from_files({}).refusal_of(with_tools=False)


def test_default_of_named_templates_is_used():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    both = ChatFiles.from_files(config_with(named))
    assert (both.plain, both.for_tools, both.shown) == ("D", "T", "T")
    alone = ChatFiles.from_files(config_with(named[:1]))
    assert (alone.plain, alone.for_tools) == (None, "T")
    alone = ChatFiles.from_files(config_with(named[1:]))
    assert (alone.plain, alone.for_tools) == ("D", "D")
    no_default = ChatFiles.from_files(config_with([named[0], {"name": "rag", "template": "R"}]))
    assert (no_default.plain, no_default.for_tools) == (None, "T")
    assert "are named 'rag', 'tool_use', and none 'default'" in no_default.refusal_of(with_tools=False)
    other = ChatFiles.from_files(config_with([{"name": "rag", "template": "R"}]))
    assert "are named 'rag', and none 'default'" in other.refusal_of(with_tools=True)
    assert not no_default.refusal_of(with_tools=True)


def test_token_variables_come_from_config_and_in_older_models_from_the_map():
    config = {"bos_token": {"content": "<bos>", "special": True}, "eos_token": "</s>", "pad_token": None}
    special = {"bos_token": "<from map>", "unk_token": {"content": "<unk>"}}
    files = {
        "tokenizer_config.json": json.dumps(config).encode(),
        "special_tokens_map.json": json.dumps(special).encode(),
    }
    assert ChatFiles.from_files(files).variables == {
        "bos_token": "<from map>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    files["tokenizer_config.json"] = json.dumps({**config, "added_tokens_decoder": {}}).encode()
    assert ChatFiles.from_files(files).variables == {"bos_token": "<bos>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "must hold a JSON object, not list"),
        (b"[" * 100_000, "is nested too deeply"),
    ],
)
def test_error_names_the_broken_file(content, says):
    with pytest.raises(ValueError, match=f"tokenizer_config.json {says}"):
        ChatFiles.from_files({"tokenizer_config.json": content})


@pytest.mark.parametrize(
    "templates", [[{"name": "default"}], [{"template": "x"}], ["x"], [{"name": "default", "template": 7}], {"a": None}]
)
def test_malformed_named_templates_disable_only_chat(templates):
    chat = ChatFiles.from_files(config_with(templates))
    assert "entry of chat_template" in chat.refusal_of(with_tools=False)


def test_template_that_is_not_text_disables_only_chat():
    assert "not UTF-8" in ChatFiles.from_files({"chat_template.jinja": b"\xff"}).refusal_of(with_tools=True)
