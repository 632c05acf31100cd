"""Turns with tool calls have the form that the chat template renders."""

import re
from dataclasses import replace

import pytest

from frontend.text.chat.messages import ChatMessage, ChatOptions, ToolCall
from frontend.text.chat.template_turns import CallForm, find_call_form
from frontend.text.chat_template import ChatTemplate, ChatTemplateError

QUESTION = ChatMessage("user", "Weather?")
KOELN, BONN = (
    ToolCall("call00001", "get_weather", '{"city":  "Köln"}'),
    ToolCall("call00002", "get_time", '{"in": "Bonn"}'),
)
CALL = ChatMessage("assistant", tool_calls=(KOELN,))
RESULT, TIME = (
    ChatMessage("tool", "12", tool_call_id="call00001"),
    ChatMessage("tool", "noon", tool_call_id="call00002"),
)

TEXT_ARGUMENTS = """\
{%- for message in messages %}
{{- '[' + message.role + ']' }}
{%- for call in message.tool_calls %}{{- call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}
{%- if message.content is not none %}{{- message.content + '.' }}{% endif %}
{%- endfor %}"""

NONE_CONTENT = """\
{%- for message in messages %}
{%- if message.role == 'assistant' and message.content is none %}
{%- for call in message.tool_calls %}{{- call.function.name + '(' + ARGUMENTS + ')' }}{% endfor %}
{%- else %}{{- '[' + message.role + ']' + message.content }}{% endif %}
{%- endfor %}"""

OBJECT_ARGUMENTS = """\
{%- for message in messages %}
{{- '[' + message.role + ']' + message.content }}
{%- for call in message.tool_calls %}
{%- for name, value in call.function.arguments | items %}
{{- call.function.name + '.' + name + '=' + value }}
{%- endfor %}
{%- endfor %}
{%- endfor %}"""

ONE_TEXT_BESIDE_CALLS = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{- raise_exception('two texts') }}{% endif %}
{%- if message.content or message.thinking %}{{- '[analysis]' + (message.content or message.thinking) }}{% endif %}
{{- '[' + message.tool_calls[0].function.name + ']' + message.tool_calls[0].function.arguments | tojson }}
{%- else %}{{- '[' + message.role + ']' + message.content }}{% endif %}
{%- endfor %}"""

ONE_CALL_PER_TURN = """\
{%- for message in messages %}
{{- '[' + message.role + ']' + message.content }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call only') }}{% endif %}
{{- message.tool_calls[0].function.name + message.tool_calls[0].function.arguments | tojson }}
{%- endif %}
{%- endfor %}"""

IDS_OF_NINE = """\
{%- for message in messages %}
{%- for call in message.tool_calls %}
{%- if call.id | length CONDITION %}{{- raise_exception('ids have 9 letters and digits') }}{% endif %}
{{- '[' + call.id + ']' + call.function.name + call.function.arguments | tojson }}
{%- endfor %}
{%- if message.role == 'tool' %}
{%- if message.tool_call_id | length CONDITION %}{{- raise_exception('ids have 9 letters and digits') }}{% endif %}
{{- '[' + message.tool_call_id + ']' + message.content }}
{%- endif %}
{%- endfor %}"""


def render(source, *messages):
    return ChatTemplate(source, {}).render(messages, ChatOptions(add_generation_prompt=False))


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (OBJECT_ARGUMENTS, "[user]Weather?[assistant]get_weather.city=Köln[tool]12"),
        (TEXT_ARGUMENTS, '[user]Weather?.[assistant]get_weather({"city":  "Köln"})[tool]12.'),
        (
            NONE_CONTENT.replace("ARGUMENTS", "call.function.arguments"),
            '[user]Weather?get_weather({"city":  "Köln"})[tool]12',
        ),
        (
            NONE_CONTENT.replace("ARGUMENTS", "call.function.arguments | tojson"),
            '[user]Weather?get_weather({"city": "Köln"})[tool]12',
        ),
    ],
    ids=["object", "text", "text and none", "object and none"],
)
def test_a_call_is_rendered_in_the_form_that_the_template_takes(source, prompt):
    assert render(source, QUESTION, CALL, RESULT) == prompt


def test_arguments_are_never_written_in_pythons_notation():
    source = "{% for call in messages[1].tool_calls %}{{ call.function.name ~ call.function.arguments }}{% endfor %}"
    assert render(source, QUESTION, CALL, RESULT) == 'get_weather{"city":  "Köln"}'


def test_missing_arguments_are_an_empty_object_in_every_form():
    call = ChatMessage("assistant", tool_calls=(ToolCall("call00001", "get", ""),))
    assert render(TEXT_ARGUMENTS, QUESTION, call) == "[user]Weather?.[assistant]get({})"


def test_content_without_calls_stays_text_if_none_marks_calls():
    assert render(TEXT_ARGUMENTS, ChatMessage("user", ""), CALL, ChatMessage("assistant")).endswith("[assistant].")


@pytest.mark.parametrize(
    ("content", "reasoning", "analysis"),
    [
        ("Let me see.", "The user asks.", "[analysis]The user asks.\n\nLet me see."),
        (("Let me", "see."), "The user asks.", "[analysis]The user asks.\n\nLet me\nsee."),
        ("Let me see.", "", "[analysis]Let me see."),
        ("", "The user asks.", "[analysis]The user asks."),
        ("", "", ""),
    ],
)
def test_content_beside_calls_joins_the_reasoning_if_the_template_takes_one_of_them(content, reasoning, analysis):
    turn = ChatMessage("assistant", content, reasoning=reasoning, tool_calls=(KOELN,))
    prompt = render(ONE_TEXT_BESIDE_CALLS, QUESTION, turn, RESULT)
    assert prompt == f'[user]Weather?{analysis}[get_weather]{{"city": "Köln"}}[tool]12'


def test_content_beside_calls_never_omits_the_calls():
    turn = ChatMessage("assistant", "Let me see.", tool_calls=(KOELN,))
    source = NONE_CONTENT.replace("ARGUMENTS", "call.function.arguments")
    assert render(source, QUESTION, turn, RESULT) == '[user]Weather?get_weather({"city":  "Köln"})[tool]12'


def test_content_beside_calls_stays_where_it_is_if_the_template_takes_it():
    turn = ChatMessage("assistant", "Let me see.", reasoning="The user asks.", tool_calls=(KOELN,))
    assert render(OBJECT_ARGUMENTS, QUESTION, turn).endswith("[assistant]Let me see.get_weather.city=Köln")


CALLED = '[user]Weather?[assistant]Both.get_weather{"city": "Köln"}'


@pytest.mark.parametrize("refusal", ["{{- raise_exception('one call only') }}", ""], ids=["refuses", "omits"])
@pytest.mark.parametrize(
    ("others", "prompt"),
    [
        ([RESULT, TIME], CALLED + '[tool]12[assistant]get_time{"in": "Bonn"}[tool]noon'),
        ([TIME, RESULT], CALLED + '[tool]12[assistant]get_time{"in": "Bonn"}[tool]noon'),
        ([TIME], CALLED + '[assistant]get_time{"in": "Bonn"}[tool]noon'),
        ([TIME, QUESTION], CALLED + '[assistant]get_time{"in": "Bonn"}[tool]noon[user]Weather?'),
        ([QUESTION, RESULT], CALLED + '[assistant]get_time{"in": "Bonn"}[user]Weather?[tool]12'),
        (
            [ChatMessage("tool", "?", tool_call_id="other"), RESULT],
            CALLED + '[tool]12[assistant]get_time{"in": "Bonn"}[tool]?',
        ),
    ],
    ids=["in order", "reversed", "one result", "question", "late result", "unknown id"],
)
def test_several_calls_become_turns_of_one_call_if_the_template_takes_only_one(refusal, others, prompt):
    source = ONE_CALL_PER_TURN.replace("{{- raise_exception('one call only') }}", refusal)
    turn = ChatMessage("assistant", "Both.", tool_calls=(KOELN, BONN))
    assert render(source, QUESTION, turn, *others) == prompt


def test_calls_with_the_same_id_are_all_kept():
    turn = ChatMessage("assistant", tool_calls=(KOELN, KOELN))
    prompt = render(ONE_CALL_PER_TURN, QUESTION, turn, RESULT, RESULT)
    assert (prompt.count("get_weather"), prompt.count("[tool]12")) == (2, 2)


def test_several_calls_stay_in_one_turn_if_the_template_takes_them():
    turn = ChatMessage("assistant", tool_calls=(KOELN, BONN))
    prompt = render(TEXT_ARGUMENTS, QUESTION, turn, RESULT, TIME)
    assert prompt.endswith('[assistant]get_weather({"city":  "Köln"})get_time({"in": "Bonn"})[tool]12.[tool]noon.')


def test_the_form_is_found_once_and_only_for_conversations_with_calls(monkeypatch):
    found = []
    monkeypatch.setattr("frontend.text.chat_template.find_call_form", lambda _: found.append(CallForm()) or found[-1])
    template = ChatTemplate(OBJECT_ARGUMENTS, {})
    template.render([QUESTION])
    assert not found
    template.render([QUESTION, CALL])
    template.render([QUESTION, CALL, RESULT])
    assert len(found) == 1


def test_a_template_that_renders_no_calls_gets_the_default_form():
    assert find_call_form(lambda *_: "") == CallForm()
    assert (
        render("{% for message in messages %}{{ message.content }}{% endfor %}", QUESTION, CALL, RESULT) == "Weather?12"
    )


def test_the_error_of_the_conversation_itself_is_reported():
    with pytest.raises(ChatTemplateError, match=r"^no calls here$"):
        render("{% if messages[1].tool_calls %}{{ raise_exception('no calls here') }}{% endif %}", QUESTION, CALL)


@pytest.mark.parametrize("condition", ["!= 9", "< 9"])
@pytest.mark.parametrize("call_id", ["1", "call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9", "é\n"])
def test_ids_of_other_servers_get_the_length_that_the_template_requires(condition, call_id):
    source = IDS_OF_NINE.replace("CONDITION", condition)
    turns = [
        QUESTION,
        ChatMessage("assistant", tool_calls=(replace(KOELN, call_id=call_id), BONN)),
        *(replace(RESULT, tool_call_id=call_id), TIME),
    ]
    prompt = render(source, *turns)
    assert prompt == render(source, *turns)
    first, second, *results = re.findall(r"\[(\w+)\]", prompt)
    assert results == [first, second]
    assert re.fullmatch("[A-Za-z0-9]{9}", first)
    assert second == BONN.call_id != first


def test_ids_stay_unchanged_if_the_template_takes_them():
    for source in (IDS_OF_NINE.replace("CONDITION", "< 1"), "{{ messages[-1].tool_call_id }}"):
        call = replace(CALL, tool_calls=(replace(KOELN, call_id="call_1"),))
        assert "call_1" in render(source, QUESTION, call, replace(RESULT, tool_call_id="call_1"))


def test_ids_that_have_the_name_of_the_tool_stay_unchanged():
    """Kimi K2's template renders the id of a call instead of the name."""
    source = "{% for m in messages %}{% for call in m.tool_calls %}{{ call.id }}{{ call.function.arguments | tojson }}"
    source += "{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    call_id = "functions.weather:0"
    call = replace(CALL, tool_calls=(replace(KOELN, call_id=call_id),))
    prompt = render(source, QUESTION, call, replace(RESULT, tool_call_id=call_id))
    assert prompt.count(call_id) == 2
