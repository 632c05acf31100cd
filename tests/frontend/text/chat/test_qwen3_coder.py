"""Calls of Qwen3-Coder: lines around each value, and marks that models leave out."""

import json

import pytest

from frontend.text.chat import chat_format

SCHEMA = {
    "properties": {
        "code": {"type": "string"},
        "path": {"type": "string"},
        "days": {"type": "integer"},
        "all": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "max": {"type": ["integer", "null"]},
        "list": {"type": "array"},
        "any": {},
    }
}
VALUES = [
    ("code", "\nRome\n", "Rome"),
    ("code", "Rome", "Rome"),
    ("code", "\n\n", ""),
    ("code", "\n", ""),
    ("code", "", ""),
    ("code", "\n\n\n\n", "\n\n"),
    ("code", "\n  if a < b:\n\treturn \"x\\\\\" + '</param>'\n\n", "  if a < b:\n\treturn \"x\\\\\" + '</param>'\n"),
    ("code", "\n12\n", "12"),
    ("code", "\n</function>\n", "</function>"),
    ("code", "\n</tool_call>\n<tool_call>\n", "</tool_call>\n<tool_call>"),
    ("code", "\nnot <parameter=days> alone\n", "not <parameter=days> alone"),
    ("code", "\na\n<parameter=other>\n1\n", "a\n<parameter=other>\n1"),
    ("code", "\na\n<parameter=code>\n1\n", "a\n<parameter=code>\n1"),
    ("code", "\na\n<parameter=" + "x" * 5000 + "\n", "a\n<parameter=" + "x" * 5000),
    ("days", "\n3\n", 3),
    ("days", "\nthree\n", "three"),
    ("all", "\nTrue\n", True),
    ("all", "\nfalse\n", False),
    ("max", "\nNone\n", None),
    ("note", "\nNone\n", "None"),
    ("note", "\nnull\n", None),
    ("list", '\n[\n  "a</b>"\n]\n', ["a</b>"]),
    ("any", "\nTrue\n", "True"),
    ("unknown", '\n{"a": 1}\n', {"a": 1}),
    ('odd "key"', "\nx\n", "x"),
]


@pytest.mark.parametrize(("key", "written", "meant"), VALUES)
def test_value_is_what_is_between_the_line_breaks_of_the_format(parse, key, written, meant):
    text = f"<tool_call>\n<function=get>\n<parameter={key}>{written}</parameter>\n</function>\n</tool_call>"
    for cuts in ((), range(len(text)), range(0, len(text), 3)):
        call, (_, _, arguments) = parse("qwen3_coder", text, names={"get": SCHEMA}, cuts=cuts)
        assert call == ("call", 0, "get")
        assert json.loads(arguments) == {key: meant}


CODE = "<parameter=code>\na\n\n</parameter>\n"
DAYS = "<parameter=days>\n3\n</parameter>\n"
LENIENT = [
    "<function=get>\n" + CODE + DAYS + "</function>\n</tool_call>",
    "<function=get>\n" + CODE + DAYS + "</function>",
    "<tool_call>\n<function=get>\n" + CODE + DAYS + "</function>",
    "<tool_call>\n<function=get>\n" + CODE + DAYS + "</tool_call>",
    "<tool_call><function= get >" + CODE.strip() + DAYS.strip() + "</function></tool_call>",
    "<tool_call>\n<function=get>\n<parameter=code>\na\n\n" + DAYS + "</function>\n</tool_call>",
    "<tool_call>\n<function=get>\n" + DAYS + "<parameter=code>\na\n\n</function>\n</tool_call>",
    "<tool_call>\n<function=get>\n" + DAYS + "<parameter=code>\na\n\n</function></tool_call>",
    "<tool_call>\n<function=get>\n<parameter=code>\na\n\n<parameter=days>\n3</function>\n</tool_call>",
    "<function=get>\n" + DAYS + "<parameter=code>\na\n\n</function>",
    "<function=get>\n" + DAYS + "<parameter=code>\na\n\n</function>\n",
    "<tool_call>\n" + "<tool_call>\n<function=get>\n" + CODE + DAYS + "</function>\n</tool_call>",
]


@pytest.mark.parametrize("text", LENIENT)
def test_missing_marks_are_tolerated_where_nothing_else_can_be_meant(parse, text):
    for cuts in ((), range(len(text)), range(0, len(text), 5)):
        *before, call, (_, _, arguments) = parse("qwen3_coder", text, names={"get": SCHEMA}, cuts=cuts)
        assert before in ([], [("content", "<tool_call>")])
        assert call == ("call", 0, "get")
        assert json.loads(arguments) == {"code": "a\n", "days": 3}


def test_calls_without_arguments_and_words_may_follow_each_other(parse):
    text = (
        "Well.\n<tool_call>\n<function=get>\n</function>\n</tool_call>\n<function=put></function>"
        "<function=new>\n</tool_call>\n\nDone. "
    )
    for cuts in ((), range(len(text))):
        assert parse("qwen3_coder", text, cuts=cuts) == [
            ("content", "Well."),
            *(part for index, name in enumerate(["get", "put", "new"]) for part in called(index, name)),
            ("content", "Done. "),
        ]


def called(index, name):
    return [("call", index, name), ("arguments", index, "{}")]


BROKEN = [
    ("<function=get>\n<parameter=days>\n3\n</parameter>\nand more", {"days": 3}, "and more"),
    ("<function=get>\n<parameter=days\n3\n</parameter>\n", {}, "days\n3\n</parameter>\n"),
    ("<function=get>\n<parameter=" + "k" * 2000 + ">\n3\n", {}, "k" * 2000 + ">\n3\n"),
    ("<function=get>\n</function>\n</function>", {}, "</function>"),
]


@pytest.mark.parametrize(("text", "arguments", "rest"), BROKEN)
def test_unexpected_text_ends_a_call(parse, text, arguments, rest):
    for cuts in ((), range(len(text))):
        call, (_, _, written), content = parse("qwen3_coder", text, names={"get": SCHEMA}, cuts=cuts)
        assert call == ("call", 0, "get")
        assert json.loads(written) == arguments
        assert content == ("content", rest)


def test_value_is_held_back_only_while_it_may_be_a_mark():
    parser = chat_format(None, tools="qwen3_coder").parser(tools={"get": SCHEMA})

    def fed(text):
        return "".join(getattr(delta, "text", "") for delta in parser.feed(text))

    assert fed("<tool_call>\n<function=get>\n<parameter=code>\n") == '{"code": "'
    assert fed("one\n") == "one"
    assert fed("two\n</param") == "\\ntwo"
    assert fed("s>\n<parameter=da") == "\\n</params>"
    assert fed("y>") == "\\n<parameter=day>"
    assert fed("\n</parameter>") == '"'


def test_unfinished_value_stays_incomplete(parse):
    text = "<tool_call>\n<function=get>\n<parameter=days>\n3\n</parameter>\n<parameter=code>\nab"
    assert parse("qwen3_coder", text, names={"get": SCHEMA})[1] == ("arguments", 0, '{"days": 3, "code": "ab')
    assert parse("qwen3_coder", text[: text.index("3") + 1], names={"get": SCHEMA})[1] == ("arguments", 0, '{"days": ')


def test_many_arguments_and_marks_take_linear_time(parse):
    schema = {"properties": {f"key{number}": {"type": "string"} for number in range(300)}}
    text = "<function=get>\n<parameter=key0>\n" + "\n<parameter=key0>\n</function>\n" * 3500
    call, arguments = parse("qwen3_coder", text, names={"get": schema}, cuts=range(0, len(text), 7))
    assert call == ("call", 0, "get")
    assert len(arguments[2]) > 100_000
