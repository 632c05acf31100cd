"""Tool call formats: calls are parsed as calls, and text that only resembles a call is content."""

import json
import random
import re

import pytest

from frontend.text.chat import ToolCallArguments, ToolCallStart, chat_format

ARGUMENTS = {"city": 'Ny "Köln" }]', "days": [1, 2.5, None], "deep": {"a": {"b": "</tool_call>"}}, "e": "\n\\"}
GET = {"name": "get", "arguments": ARGUMENTS}
PUT = {"name": "put", "arguments": {}}


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def llama3(*calls):
    return "; ".join(json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in calls)


def llama3_tagged(*calls):
    return "<|python_tag|>" + llama3(*calls)


def mistral_list(*calls):
    return "[TOOL_CALLS]" + json.dumps(list(calls))


def mistral_named(*calls):
    return "".join(f"[TOOL_CALLS]{call['name']}[ARGS]{json.dumps(call['arguments'])}" for call in calls)


def mistral_with_ids(*calls):
    return "".join(
        f"[TOOL_CALLS]{call['name']}[CALL_ID]abcdefghi[ARGS]{json.dumps(call['arguments'])}" for call in calls
    )


def deepseek_v3(*calls):
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['name']}\n```json\n{json.dumps(call['arguments'])}\n```<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def deepseek_v31(*calls):
    written = [
        f"<｜tool▁call▁begin｜>{call['name']}<｜tool▁sep｜>{json.dumps(call['arguments'])}<｜tool▁call▁end｜>"
        for call in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(written) + "<｜tool▁calls▁end｜>"


def kimi_k2(*calls):
    written = [
        f"<|tool_call_begin|>functions.{call['name']}:{index}<|tool_call_argument_begin|>{json.dumps(call['arguments'])}"
        "<|tool_call_end|>"
        for index, call in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(written) + "<|tool_calls_section_end|>"


def granite(*calls):
    return "<|tool_call|>" + json.dumps(list(calls))


def granite31(*calls):
    return "<tool_call>" + json.dumps(list(calls))


def phi4_mini(*calls):
    return "functools" + json.dumps(list(calls))


def phi4_mini_tagged(*calls):
    return f"<|tool_call|>{json.dumps(list(calls))}<|/tool_call|>"


def glm45(*calls, line_break="\n"):
    written = ""
    for call in calls:
        written += f"<tool_call>{call['name']}{line_break}"
        for key, value in call["arguments"].items():
            value = value if isinstance(value, str) else json.dumps(value)
            written += f"<arg_key>{key}</arg_key>{line_break}<arg_value>{value}</arg_value>{line_break}"
        written += "</tool_call>\n"
    return written


def glm47(*calls):
    return glm45(*calls, line_break="")


def qwen3_coder(*calls, line_break="\n"):
    written = []
    for call in calls:
        arguments = ""
        for key, value in call["arguments"].items():
            value = value if isinstance(value, str) else json.dumps(value)
            arguments += f"<parameter={key}>\n{value}\n</parameter>{line_break}"
        start, end = f"<tool_call>{line_break}<function={call['name']}>", f"</function>{line_break}</tool_call>"
        written.append(f"{start}{line_break}{arguments}{end}")
    return "\n".join(written)


def qwen3_coder_in_one_line(*calls):
    return qwen3_coder(*calls, line_break="")


def harmony(*calls):
    return "<|end|>".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{call['name']} <|constrain|>json<|message|>"
        + json.dumps(call["arguments"])
        for call in calls
    )


def harmony_as_the_template_writes_it(*calls):
    return "<|call|>".join(
        f"<|start|>assistant to=functions.{call['name']}<|channel|>commentary json<|message|>"
        + json.dumps(call["arguments"])
        for call in calls
    )


WRITERS = {
    "hermes": [hermes],
    "llama3": [llama3, llama3_tagged],
    "mistral": [mistral_list, mistral_named, mistral_with_ids],
    "deepseek_v3": [deepseek_v3],
    "deepseek_v31": [deepseek_v31],
    "kimi_k2": [kimi_k2],
    "granite": [granite, granite31],
    "phi4_mini": [phi4_mini, phi4_mini_tagged],
    "glm45": [glm45, glm47],
    "qwen3_coder": [qwen3_coder, qwen3_coder_in_one_line],
    "harmony": [harmony, harmony_as_the_template_writes_it],
}
CASES = [pytest.param(tools, writer, id=writer.__name__) for tools, writers in WRITERS.items() for writer in writers]
ANYWHERE = [case for case in CASES if "llama3" not in case.id and "harmony" not in case.id]
"""Formats with calls anywhere in an answer."""


@pytest.mark.parametrize(("tools", "writer"), CASES)
def test_calls_are_parsed_in_order_with_their_arguments(parse, tools, writer):
    start, arguments, *rest = parse(tools, writer(GET, PUT))
    assert start == ("call", 0, "get")
    assert arguments[:2] == ("arguments", 0)
    assert json.loads(arguments[2]) == ARGUMENTS
    assert rest == [("call", 1, "put"), ("arguments", 1, "{}")]


@pytest.mark.parametrize(("tools", "writer"), CASES)
def test_names_may_have_the_length_that_anthropics_api_allows(parse, tools, writer):
    name = "mcp__" + "a-_9" * 30 + "end"
    assert len(name) == 128
    parts = parse(tools, writer({"name": name, "arguments": {"a": 1}}), names=(name,))
    assert parts == [("call", 0, name), ("arguments", 0, '{"a": 1}')]


@pytest.mark.parametrize(("tools", "writer"), [case for case in CASES if "harmony" not in case.id])
def test_without_offered_tools_calls_are_content(parse, tools, writer):
    assert parse(tools, writer(GET), names=()) == [("content", writer(GET))]


@pytest.mark.parametrize(("tools", "writer"), ANYWHERE)
def test_all_calls_between_words_are_found_in_any_chunks(parse, tools, writer):
    rng = random.Random(writer.__name__)
    for _ in range(10):
        texts, expected = [], []
        for index in range(rng.randrange(1, 6)):
            if rng.random() < 0.5:
                words = rng.choice(["Some words", "a < b", "{}", '{"name": "get"}', "[1, 2]"])
                texts.append(words + rng.choice([".", " ", "\n\n"]))
                expected.append(("content", texts[-1].strip()))
            arguments = {rng.choice(["a", "é"]): rng.choice([1, "}]</tool_call>[TOOL_CALLS]", {"b": []}, None])}
            name = rng.choice(["get", "put", "not-offered"])
            texts.append(writer({"name": name, "arguments": arguments}))
            expected += [("call", index, name), ("arguments", index, arguments)]
        text = "".join(texts)
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
        found = parse(tools, text, cuts=cuts)
        assert [comparable(part) for part in found] == expected, text


def comparable(part):
    match part:
        case ("content", text):
            return ("content", text.strip())
        case ("arguments", index, text):
            return ("arguments", index, json.loads(text))
    return part


@pytest.mark.parametrize(("tools", "writer"), ANYWHERE)
def test_words_around_calls_are_content_without_the_space_between(parse, tools, writer):
    parts = parse(tools, "  First this:\n\n" + writer(PUT) + "\n\nThen that. ")
    assert parts == [
        ("content", "  First this:"),
        ("call", 0, "put"),
        ("arguments", 0, "{}"),
        ("content", "Then that. "),
    ]


@pytest.mark.parametrize(("tools", "writer"), CASES)
def test_arguments_are_streamed_as_they_arrive(tools, writer):
    text = writer({"name": "get", "arguments": {"text": "word " * 100}})
    parser = chat_format(None, tools=tools).parser(tools={"get": {"properties": {"text": {"type": "string"}}}})
    num_pieces = num_chars = 0
    for char in text[: text.index("word") + 300]:
        for delta in parser.feed(char):
            if isinstance(delta, ToolCallArguments):
                num_pieces += 1
                num_chars += len(delta.text)
    assert num_pieces > 250
    assert num_chars >= 300


@pytest.mark.parametrize(("tools", "writer"), CASES)
def test_answer_cut_inside_the_arguments_keeps_their_beginning(parse, tools, writer):
    text = writer(GET)
    end = text.index("days")
    name, arguments = parse(tools, text[:end])
    assert name == ("call", 0, "get")
    assert any(json.dumps(ARGUMENTS, ensure_ascii=escaped).startswith(arguments[2]) for escaped in (True, False))
    assert arguments[2].endswith('"' if tools in ("glm45", "qwen3_coder") else ', "')


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>not a call</tool_call>"),
        ("hermes", '<tool_call>\n["get"]\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ' + "1" * 5000 + ', "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "' + "[" * 5000 + '"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": ' + "1" * 5000 + '}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", "arguments": "{\\"a\\": "}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "get", '),
        ("hermes", "I write <tool_cal"),
        ("hermes", "a </tool_call> alone, a <tool_call/> and <tool_call"),
        ("llama3", '{"name": "other", "parameters": {}}'),
        ("llama3", '{"name": "get"}'),
        ("llama3", '{"name": "get", "age": 3, "parameters": {}}'),
        ("llama3", '  {"answer": 42}'),
        ("llama3", 'Well: {"name": "get", "parameters": {}}'),
        ("llama3", "<|python_tag|>print(1)"),
        ("llama3", "<|python_t"),
        ("llama3", "\n"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", '[TOOL_CALLS] [{"name": 1}]'),
        ("mistral", "[TOOL_CALLS]get"),
        ("mistral", '[TOOL_CALLS]two words{"a": 1}'),
        ("mistral", '[TOOL_CALLS][ARGS]{"a": 1}'),
        ("mistral", "[TOOL_CALLS]" + "a" * 300 + "{}"),
        ("mistral", '[{"name": "get", "arguments": {}}]'),
        ("mistral", "[TOOL_CALL"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n[1]\n```<｜tool▁call▁end｜>"),
        ("deepseek_v3", '<｜tool▁call▁begin｜>get<｜tool▁sep｜>{"a": 1}'),
        ("deepseek_v31", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"a": 1}\n```'),
        ("deepseek_v31", '<｜tool▁calls▁begin｜>get{"a": 1}'),
        ("deepseek_v31", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>"),
        ("kimi_k2", '<|tool_call_begin|>functions.get<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'),
        ("kimi_k2", "<|tool_calls_section_begin|>x<|tool_calls_section_end|>"),
        ("kimi_k2", '<|tool_call_begin|>functions.get:x<|tool_call_argument_begin|>{"a": 1}'),
        ("granite", '<|tool_call|>{"name": "get", "arguments": {}}'),
        ("granite", "<|tool_call|>[1]"),
        ("granite", "<|tool_call|>" + " " * 300 + '[{"name": "get"}]'),
        ("phi4_mini", "import functools\nprint(functools)"),
        ("phi4_mini", "functools[0]"),
        ("phi4_mini", '[{"name": "get", "arguments": {}}]'),
        ("glm45", "<tool_call>two words\n<arg_key>a</arg_key>"),
        ("glm45", "<tool_call></tool_call>"),
        ("glm45", '<tool_call>{"name": "get"}</tool_call>'),
        ("glm45", "<tool_call>get"),
        ("glm45", "<tool_call>" + "a" * 300 + "</tool_call>"),
        ("glm45", "<arg_key>a</arg_key>"),
        ("qwen3_coder", "<tool_call>get</tool_call>"),
        ("qwen3_coder", '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=two words>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=get\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("qwen3_coder", "<tool_call>\n<function=" + "a" * 300 + ">\n<parameter=a>\n"),
        ("qwen3_coder", "<function=" + "a" * 129 + ">\n<parameter=a>\n"),
        ("qwen3_coder", "<tool_call>\n<function=get>\n"),
        ("qwen3_coder", "<function=get> is a <parameter=a>, <parameter=b> or </parameter>"),
        ("qwen3_coder", "<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_text_that_only_resembles_a_call_is_content(parse, tools, text):
    assert parse(tools, text) == [("content", text)]
    assert parse(tools, text, cuts=range(len(text))) == [("content", text)]


def test_content_is_held_back_only_while_it_may_be_a_mark():
    parser = chat_format(None, tools="hermes").parser(tools={"get": {"properties": {"text": {"type": "string"}}}})
    assert [delta.text for delta in parser.feed("a < b <tool")] == ["a < b"]
    assert [delta.text for delta in parser.feed("s> c")] == [" <tools> c"]


def test_first_member_decides_that_an_object_is_not_a_call():
    parser = chat_format(None, tools="llama3").parser(tools={"get": {"properties": {"text": {"type": "string"}}}})
    assert parser.feed('{"answer": ') == []
    assert [delta.text for delta in parser.feed('"4')] == ['{"answer": "4']


def test_failed_call_does_not_hide_the_next(parse):
    text = '<tool_call>\n<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert parse("hermes", text) == [("content", "<tool_call>"), ("call", 0, "get"), ("arguments", 0, "{}")]
    text = '[TOOL_CALLS] none [TOOL_CALLS]get{"a": 1}'
    assert parse("mistral", text) == [
        ("content", "[TOOL_CALLS] none"),
        ("call", 0, "get"),
        ("arguments", 0, '{"a": 1}'),
    ]


def test_members_may_have_any_order_and_unknown_ones_are_ignored(parse):
    text = '<tool_call>{"id": "x", "arguments": {"a": [1]}, "why": ["b"], "name": "get"}</tool_call>'
    assert parse("hermes", text) == [("call", 0, "get"), ("arguments", 0, '{"a": [1]}')]
    text = '{"type": "function", "parameters": {"a": 1}, "name": "get"}'
    assert parse("llama3", text) == [("call", 0, "get"), ("arguments", 0, '{"a": 1}')]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('"arguments": "{\\"a\\": 1}"', '{"a": 1}'),
        ('"arguments": ""', "{}"),
        ('"arguments": null', "{}"),
        ('"other": 1', "{}"),
        ('"arguments": {"a": "two\nlines\t"}', '{"a": "two\\nlines\\t"}'),
    ],
)
def test_unusual_arguments_are_converted_to_an_object(parse, written, meant):
    for text in (
        f'<tool_call>{{"name": "get", {written}}}</tool_call>',
        f'<tool_call>{{{written}, "name": "get"}}</tool_call>',
    ):
        call, (_, _, arguments) = parse("hermes", text)
        assert call == ("call", 0, "get")
        assert json.loads(arguments) == json.loads(meant)


def test_missing_closing_mark_ends_only_the_call(parse):
    text = '<tool_call>{"name": "get", "arguments": {}}\n<tool_call>{"name": "put", "arguments": {}}</tool_ca'
    assert [part for part in parse("hermes", text) if part[0] != "arguments"] == [
        ("call", 0, "get"),
        ("call", 1, "put"),
    ]


@pytest.mark.parametrize(("tools", "writer"), ANYWHERE)
def test_space_before_a_call_is_omitted_even_if_nothing_follows(parse, tools, writer):
    text = "Words.\n\n" + writer(GET)
    for end in (text.index("days"), len(text)):
        assert [part[0] for part in parse(tools, text[:end])] == ["content", "call", "arguments"]


@pytest.mark.parametrize(
    ("between", "is_call"),
    [(" " * 150, True), (" " * 199, True), (" " * 200, False), (" " * 300, False), ("\n", True)],
)
@pytest.mark.parametrize("call", ['[{"name": "get", "arguments": {}}]', '{"a": 1}'])
def test_mistral_call_must_start_soon_after_its_mark(parse, between, is_call, call):
    text = "[TOOL_CALLS]" + (between + call if call.startswith("[") else f"get{between[3:]}{call}")
    for cuts in ((), range(len(text)), (12, 211, 212)):
        parts = parse("mistral", text, cuts=cuts)
        assert (parts[0] == ("call", 0, "get")) == is_call
        assert is_call or parts == [("content", text)]


def test_llama_may_call_unknown_tools_after_its_tag(parse):
    assert parse("llama3", ' <|python_tag|>{"name": "new"}')[0] == ("call", 0, "new")


IDS = {"hermes": r"call_[0-9a-f]{24}", "mistral": r"[A-Za-z0-9]{9}", "kimi_k2": r"functions\.put:\d+"}


@pytest.mark.parametrize(("tools", "pattern"), IDS.items())
def test_each_call_has_a_unique_id_that_templates_accept(tools, pattern):
    parser = chat_format(None, tools=tools).parser(tools={"get": {"properties": {"text": {"type": "string"}}}})
    text = WRITERS[tools][0](*[PUT] * 20)
    ids = [delta.call_id for delta in parser.feed(text) if isinstance(delta, ToolCallStart)]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
