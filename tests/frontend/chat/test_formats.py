"""Formats are guessed from what a template teaches its model, and chosen by name."""

import pytest

from frontend.chat import REASONING_FORMATS, TOOL_FORMATS, ChatFormat, chat_format

HERMES = """{%- if tools %}For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>{%- endif %}"""
QWEN3 = HERMES + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
XML_CALLS = HERMES + "<tool_call>\\n<function=example>\\n<parameter=a>"
LLAMA3 = """{{- 'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- '<|start_header_id|>assistant<|end_header_id|>' }}"""
MISTRAL = "{{- '[TOOL_CALLS][' }}"
MAGISTRAL = MISTRAL + "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", "none"),
        (QWEN3, "hermes", "think"),
        (XML_CALLS, "none", "none"),
        (LLAMA3, "llama3", "none"),
        ("{{ '<|start_header_id|>' + message.role }}", "none", "none"),
        (MISTRAL, "mistral", "none"),
        (MAGISTRAL, "mistral", "mistral"),
        ("{{ message.content.split('</think>')[-1] }}", "none", "think"),
        ("", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_the_format_is_guessed_from_the_template(template, tools, reasoning):
    assert chat_format(template) == ChatFormat(tools, reasoning)


def test_a_name_wins_over_the_guess():
    assert chat_format(QWEN3, tools="llama3", reasoning="none") == ChatFormat("llama3", "none")
    assert chat_format(None, tools="mistral") == ChatFormat("mistral", "none")


def test_unknown_names_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match="'pythonic' is no format of tool calls; known are auto, none, hermes"):
        chat_format(None, tools="pythonic")
    with pytest.raises(ValueError, match="'harmony' is no format of reasoning; known are auto, none, think"):
        chat_format(None, reasoning="harmony")


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_every_format_has_a_parser(tools, reasoning):
    parser = chat_format(QWEN3, tools=tools, reasoning=reasoning).parser(tool_names=["get"])
    assert [delta.text for delta in [*parser.feed("Hi"), *parser.finish()]] == ["Hi"]


def test_only_marks_that_are_special_tokens_need_them_in_the_text():
    assert not chat_format(QWEN3).needs_special_tokens
    assert not chat_format(LLAMA3).needs_special_tokens
    assert chat_format(MISTRAL).needs_special_tokens
    assert chat_format(None, reasoning="mistral").needs_special_tokens
