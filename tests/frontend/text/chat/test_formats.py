"""Formats are detected from the chat template, or selected by name."""

import pytest

from frontend.text.chat import REASONING_FORMATS, TOOL_FORMATS, ChatFormat, chat_format

HERMES = """{%- if tools %}For each function call, return a json object within <tool_call></tool_call> XML tags:
<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>{%- endif %}"""
QWEN3 = HERMES + "{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
QWEN3_CODER = """{%- if tools %}Call functions so: <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue{%- endif %}
{{- '<tool_call>\\n<function=' + name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}{{- '\\n</parameter>\\n' }}"""
QWEN3_5 = QWEN3_CODER + "{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n' }}"
LLAMA3 = """{{- 'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- '<|start_header_id|>assistant<|end_header_id|>' }}"""
MISTRAL = "{{- '[TOOL_CALLS][' }}"
MAGISTRAL = MISTRAL + "{{ '[THINK]' + block['thinking'] + '[/THINK]' }}"


DEEPSEEK = "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + %s + '<｜tool▁call▁end｜>'}}"
DEEPSEEK_V3 = DEEPSEEK % (
    "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n```json\\n' + tool['function']['arguments']"
)
DEEPSEEK_R1 = DEEPSEEK_V3 + "{% if '</think>' in content %}{% endif %}{{'<｜Assistant｜><think>\\n'}}"
DEEPSEEK_V31 = (
    DEEPSEEK % "tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments']" + "{{'</think>'}}"
)
GLM = HERMES.replace('{"name"', "<arg_key>{arg-key}</arg_key>") + "{{ '<think></think>' }}"
KIMI = "{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson }}"
KIMI_THINKING = (
    "<|tool_calls_section_begin|>{% for call in calls %}<|tool_call_begin|>{% endfor %}<think>{{ rc }}</think>"
)
GRANITE3 = "When a tool is required, respond with <|tool_call|> followed by a JSON list of tools used."
GRANITE32 = GRANITE3 + 'begin it with "Here is my thought process:" ... after "Here is my response:"'
GRANITE33 = GRANITE3 + "between <think></think> tags and your response between <response></response> tags"
PHI4_MINI = "{{ '<|system|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
PHI4_REASONING = "structured into <think> {Thought section} </think> {Solution section}"
HARMONY = '{{- "<|start|>assistant to=functions." + name + "<|channel|>commentary json<|message|>" }}'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        (HERMES, "hermes", "none"),
        (QWEN3, "hermes", "think"),
        (QWEN3_CODER, "qwen3_coder", "none"),
        (QWEN3_5, "qwen3_coder", "think"),
        (HERMES + "<function=name>{...}</function>", "none", "none"),
        (QWEN3_CODER.replace("<tool_call>", "<seed:tool_call>"), "none", "none"),
        (LLAMA3, "llama3", "none"),
        ("{{ '<|start_header_id|>' + message.role }}", "none", "none"),
        (MISTRAL, "mistral", "none"),
        (MAGISTRAL, "mistral", "mistral"),
        ("{{ message.content.split('</think>')[-1] }}", "none", "think"),
        (MISTRAL + "[ARGS]", "mistral_names", "none"),
        (DEEPSEEK_V3, "deepseek_v3", "none"),
        (DEEPSEEK_R1, "deepseek_v3", "think"),
        (DEEPSEEK_V31, "deepseek_v31", "think"),
        (GLM, "glm45", "think"),
        (KIMI, "kimi_k2", "none"),
        (KIMI_THINKING, "kimi_k2", "think"),
        (GRANITE3, "granite", "none"),
        (GRANITE32, "granite", "granite32"),
        (GRANITE33, "granite", "granite"),
        (PHI4_MINI, "phi4_mini", "none"),
        ('functools[{"name": [function name]}]', "phi4_mini", "none"),
        ("<|tool|>{{ tools }}<|/tool|> <|tool_call|>", "phi4_mini", "none"),
        (PHI4_REASONING, "none", "think"),
        (HARMONY, "harmony", "harmony"),
        ("", "none", "none"),
        (None, "none", "none"),
    ],
)
def test_format_is_detected_from_the_template(template, tools, reasoning):
    assert chat_format(template) == ChatFormat(tools, reasoning)


def test_configured_format_overrides_detection():
    assert chat_format(QWEN3, tools="llama3", reasoning="none") == ChatFormat("llama3", "none")
    assert chat_format(None, tools="mistral") == ChatFormat("mistral", "none")
    assert chat_format(MISTRAL + "[ARGS]", tools="mistral") == ChatFormat("mistral_names", "none"), "of two, the newer"


def test_unknown_formats_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'pythonic' is no format of tool calls; known are auto, none, harmony"):
        chat_format(None, tools="pythonic")
    with pytest.raises(ValueError, match="'harmonic' is no format of reasoning; known are auto, none, granite32"):
        chat_format(None, reasoning="harmonic")


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_every_format_has_a_parser(tools, reasoning):
    parser = chat_format(QWEN3, tools=tools, reasoning=reasoning).parser(tools={"get": {}})
    assert [delta.text for delta in [*parser.feed("Hi"), *parser.finish()]] == ["Hi"]


def test_marks_are_the_texts_that_a_parser_needs():
    qwen, mistral = chat_format(QWEN3), chat_format(None, tools="mistral", reasoning="mistral")
    assert qwen.marks(with_tools=True) == {"<think>", "</think>", "<tool_call>", "</tool_call>"}
    assert qwen.marks(with_tools=False) == {"<think>", "</think>"}
    assert mistral.marks(with_tools=True) == {"[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"}
    assert "<|channel|>" in chat_format(None, tools="harmony").marks(with_tools=False)
    assert not chat_format(None).marks(with_tools=True)
