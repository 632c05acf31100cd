"""Tools, calls, parts and variables are rendered as by transformers."""

import itertools
import json

import pytest
import tokenizers
import transformers

from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.text.chat_template import ChatTemplate, ChatTemplateError

HERMES_LIKE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Return {"name": <function-name>, "arguments": <args>} within <tool_call></tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '?' %}{%- endif %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' + message.tool_call_id + message.name }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is string %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{- tool_call.arguments }}
{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3_LIKE = """\
{{- bos_token }}
{%- if not tools is none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
{%- if 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls!') }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end_header_id|>\\n\\n' }}
{%- if message['content'] is string %}{{- message['content'] | trim }}
{%- else %}{%- for content in message['content'] %}{{- content['text'] | trim }}{%- endfor %}{%- endif %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TEMPLATES = {"hermes": HERMES_LIKE, "llama3": LLAMA3_LIKE}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather <b>now</b> in 'Köln'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
QUESTION = {"role": "user", "content": "How is the weather?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": [1]}}}
    ],
}
RESULT = {"role": "tool", "content": '{"t": 12}', "tool_call_id": "c1", "name": "get_weather"}
THOUGHT = {"role": "assistant", "content": "Mild. ", "reasoning_content": "12 is mild"}
CONVERSATIONS = {
    "question": [QUESTION],
    "system": [{"role": "system", "content": "Be brief."}, QUESTION],
    "call": [QUESTION, CALL, RESULT],
    "two calls": [QUESTION, {**CALL, "tool_calls": CALL["tool_calls"] * 2}, RESULT, RESULT],
    "thought": [QUESTION, CALL, RESULT, THOUGHT, QUESTION],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " one"}, {"type": "text", "text": "two "}]}],
}


@pytest.fixture(scope="module")
def reference():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def message(turn):
    content = turn["content"]
    return ChatMessage(
        turn["role"],
        content if isinstance(content, str) else tuple(part["text"] for part in content),
        name=turn.get("name", ""),
        reasoning=turn.get("reasoning_content", ""),
        tool_calls=tuple(
            ToolCall(
                call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
            )
            for call in turn.get("tool_calls", ())
        ),
        tool_call_id=turn.get("tool_call_id", ""),
    )


def render(template, turns, **options):
    return ChatTemplate(template, {"bos_token": "<s>"}).render(
        [message(turn) for turn in turns], ChatOptions(**options)
    )


VARIABLES = [{}, {"enable_thinking": False}, {"enable_thinking": True, "unknown": [1]}]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_tools_calls_and_variables_are_rendered_as_by_transformers(reference, template, conversation):
    source, turns = TEMPLATES[template], CONVERSATIONS[conversation]
    expected_turns = turns
    if conversation == "two calls" and template == "llama3":  # a template of single calls gets one turn per call
        expected_turns = [QUESTION, CALL, CALL, RESULT, RESULT]
    if conversation == "parts" and template == "hermes":  # a template of plain texts gets lines instead of parts
        expected_turns = [{**turns[0], "content": " one\ntwo "}]
    for tools, kwargs in itertools.product([(), (TOOL,), (TOOL, TOOL)], VARIABLES):
        options = {"tools": list(tools) or None, "tokenize": False, "add_generation_prompt": True, **kwargs}
        try:
            expected = reference.apply_chat_template(expected_turns, chat_template=source, **options)
        except Exception as error:  # raised by the template
            with pytest.raises(ChatTemplateError, match=str(error)[:40]):
                render(source, turns, tools=tools, template_kwargs=kwargs)
        else:
            assert render(source, turns, tools=tools, template_kwargs=kwargs) == expected


@pytest.mark.parametrize("content", ["The answer", "The answer is ", "  two\n\nlines \n", "x CONTINUE_FINAL"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_final_message_is_continued_as_by_transformers(reference, template, content):
    turns = [QUESTION, {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        turns, chat_template=TEMPLATES[template], tokenize=False, continue_final_message=True
    )
    assert render(TEMPLATES[template], turns, continue_final_message=True) == expected
    parts = [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": content}]}]
    assert render(TEMPLATES[template], parts, continue_final_message=True) == expected


def test_message_that_the_template_omits_cannot_be_continued():
    with pytest.raises(ChatTemplateError, match="the template leaves it out"):
        render("{{ messages[0].content }}", [QUESTION, QUESTION], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="no content to continue"):
        render(
            "{% for part in messages[-1].content %}{% endfor %}",
            [{**QUESTION, "content": []}],
            continue_final_message=True,
        )


def test_assistants_message_is_opened_unless_disabled():
    assert render(HERMES_LIKE, [QUESTION]).endswith("<|im_start|>assistant\n")
    assert render(HERMES_LIKE, [QUESTION], add_generation_prompt=False).endswith("weather?<|im_end|>\n")


def test_continued_message_opens_no_further_message():
    template = "{{ add_generation_prompt }} {{ messages[-1].content }}"
    assert render(template, [QUESTION], continue_final_message=True) == "False " + QUESTION["content"]


@pytest.mark.parametrize(
    ("loop", "single", "several"),
    [
        ("{{ message.content }}", "a", "a\nb"),
        ("{% for part in message.content %}{{ part.text }}{% endfor %}", "a", "ab"),
        ("{% for part in message['content'] | list %}{{ part.type }}{% endfor %}", "text", "texttext"),
        ("{% set content = message.content %}{% for c in content %}{{ c.text }}{% endfor %}", "a", "ab"),
        (
            "{% if message.content is string %}{{ message.content }}!{% else %}"
            "{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}",
            "a!",
            "ab",
        ),
    ],
)
def test_content_has_the_type_that_the_template_expects(loop, single, several):
    template = ChatTemplate("{% for message in messages %}" + loop + "{% endfor %}", {})
    assert template.render([ChatMessage("user", "a")]) == single
    assert template.render([ChatMessage("user", ("a", "b"))]) == several


@pytest.mark.parametrize("arguments", ["not json", "[1]", '"text"', "[" * 100_000])
def test_arguments_that_are_not_an_object_stay_text(arguments):
    turn = ChatMessage("assistant", tool_calls=(ToolCall("c", "f", arguments),))
    assert ChatTemplate("{{ messages[0].tool_calls[0].function.arguments }}", {}).render([turn]) == arguments


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception", "range"]
)
def test_reserved_variables_cannot_be_set(name):
    with pytest.raises(ChatTemplateError, match=f"the variable '{name}' is the template's own"):
        render(HERMES_LIKE, [QUESTION], template_kwargs={name: "x"})


@pytest.mark.parametrize(
    "value", ["{{ 7 * 7 }}", {"__class__": "x"}, ["{% raw %}"], {"a": {"b": None}}, 1.5, True, None]
)
def test_values_of_variables_are_not_evaluated(value):
    template = ChatTemplate("{{ extra | tojson }}|{{ tools | tojson }}", {})
    rendered = template.render(
        [ChatMessage("user", "x")], ChatOptions(tools=({"a": value},), template_kwargs={"extra": value})
    )
    assert rendered == f"{json.dumps(value)}|{json.dumps([{'a': value}])}"


def test_num_chars_counts_all_text_that_a_template_may_insert():
    turn = ChatMessage("user", ("ab", "c"), "name", "why", (ToolCall("id", "f", "{}"),), "call")
    assert turn.num_chars == len("user" + "abc" + "name" + "why" + "id" + "f" + "{}" + "call")
    assert ChatMessage("user", "é").num_chars == 5
    assert ChatOptions(tools=({"a": "é"},), template_kwargs={"b": [1]}).num_chars == len('{"a": "é"}') + len("[1]")


def test_defaults_of_variables_apply_where_a_request_sets_none():
    template = ChatTemplate("{{ a }}{{ b }}{{ documents }}", {"eos_token": "</s>"}, {"a": 1, "b": False})
    question = [ChatMessage("user", "x")]
    assert template.render(question) == "1FalseNone"
    assert template.render(question, ChatOptions(template_kwargs={"b": 2, "documents": 3})) == "123"
    for name in ("messages", "eos_token", "range"):
        with pytest.raises(
            ChatTemplateError, match=f"'{name}' in --default-chat-template-kwargs is the template's own"
        ):
            ChatTemplate("{{ a }}", {"eos_token": "</s>"}, {name: 1})


PHI4_MINI_LIKE = """\
{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\
{% if m['role'] == 'system' and 'tools' in m and m['tools'] is not none %}<|tool|>{{ m['tools'] }}<|/tool|>{% endif %}\
<|end|>{% endfor %}<|assistant|>"""


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "Be brief."}]])
def test_template_that_reads_tools_of_messages_gets_them_in_the_system_message(reference, messages):
    described = json.dumps([TOOL["function"]], ensure_ascii=False)
    prompt = render(PHI4_MINI_LIKE, [*messages, QUESTION], tools=[TOOL])
    told = {**(messages[0] if messages else {"role": "system", "content": ""}), "tools": described}
    assert prompt == reference.apply_chat_template(
        [told, QUESTION], chat_template=PHI4_MINI_LIKE, tokenize=False, add_generation_prompt=True
    )
    assert f"<|tool|>{described}<|/tool|>" in prompt
    assert "<|tool|>" not in render(PHI4_MINI_LIKE, [*messages, QUESTION])
