"""The harmony format of gpt-oss: headers separate reasoning, content and calls."""

import pytest

from frontend.text.chat import ContentText, ReasoningText, chat_format

START = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Yes."
CALL = '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": 1}'
CALLED = [("call", 0, "get"), ("arguments", 0, '{"a": 1}')]

ANSWERS = [
    (THOUGHT + FINAL, [("reasoning", "Hm."), ("content", "Yes.")]),
    (THOUGHT + FINAL + "<|return|>", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("<|channel|>final<|message|>Yes.", [("content", "Yes.")]),
    (THOUGHT + CALL, [("reasoning", "Hm."), *CALLED]),
    (THOUGHT + CALL + "<|call|>", [("reasoning", "Hm."), *CALLED]),
    (
        THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>" + CALL,
        [("reasoning", "Hm."), ("content", "I look."), *CALLED],
    ),
    (' to=functions.get<|channel|>commentary json<|message|>{"a": 1}<|call|>', CALLED),
    ('<|channel|>commentary to=functions.get<|message|>{"a": 1}', CALLED),
    ('<|channel|>analysis to=functions.get code<|message|> {"a": 1}', CALLED),
    ("<|channel|>commentary to=functions.get<|message|><|call|>", [("call", 0, "get"), ("arguments", 0, "{}")]),
    ("<|channel|>commentary to=functions.get<|message|>What?", [("content", "What?")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("reasoning", "1 + 1")]),
    (THOUGHT + "<|start|>assistant" + THOUGHT + FINAL, [("reasoning", "Hm.\nHm."), ("content", "Yes.")]),
    (
        CALL + "<|call|>" + CALL.replace("get", "put") + "<|call|>",
        [*CALLED, ("call", 1, "put"), ("arguments", 1, '{"a": 1}')],
    ),
    (THOUGHT + "<|start|>assistant<|chan", [("reasoning", "Hm.")]),
    ("<|channel|>analysis", []),
    ("Just words.", [("content", "Just words.")]),
    ("assistant", [("content", "assistant")]),
    ("to be, or not", [("content", "to be, or not")]),
    ("<|channel|>of deep water<|message|>Hi", [("content", "<|channel|>of deep water<|message|>Hi")]),
    ("<|channel|>" + "x" * 400 + "<|message|>Hi", [("content", "<|channel|>" + "x" * 400 + "<|message|>Hi")]),
]


@pytest.mark.parametrize(("text", "parts"), ANSWERS)
@pytest.mark.parametrize("prompt", ["", START])
def test_headers_determine_the_kind_of_a_message(parse, prompt, text, parts):
    assert parse("harmony", text, reasoning="harmony", prompt=prompt) == parts
    assert parse("harmony", text, reasoning="harmony", prompt=prompt, cuts=range(len(text))) == parts


def test_answer_may_continue_a_message_of_the_prompt(parse):
    for channel, kind in (("final", "content"), ("analysis", "reasoning")):
        prompt = START + f"<|channel|>{channel}<|message|>So"
        assert parse("harmony", " far.<|end|>" + FINAL, prompt=prompt)[0][:2] in {
            ("content", " far.\nYes."),
            ("reasoning", " far."),
        } & {("content", " far.\nYes.") if kind == "content" else ("reasoning", " far.")}


def test_without_tools_messages_to_functions_are_content(parse):
    assert parse("harmony", THOUGHT + CALL, names=()) == [("reasoning", "Hm."), ("content", '{"a": 1}')]


def test_either_setting_selects_the_whole_format():
    for names in ({"tools": "harmony", "reasoning": "none"}, {"tools": "none", "reasoning": "harmony"}):
        parser = chat_format(None, **names).parser()
        assert [*parser.feed(THOUGHT + FINAL), *parser.finish()] == [ReasoningText("Hm."), ContentText("Yes.")]


def test_reasoning_and_content_are_streamed():
    parser = chat_format(None, tools="harmony").parser(prompt=START)
    assert parser.feed("<|channel|>analysis<|message|>One") == [ReasoningText("One")]
    assert parser.feed(" two <|e") == [ReasoningText(" two ")]
    assert parser.feed("nd|><|start|>assistant<|channel|>final") == []
    assert parser.feed("<|message|>Yes") == [ContentText("Yes")]
    assert parser.feed(" a < b") == [ContentText(" a < b")]


def test_whitespace_in_headers_is_ignored(parse):
    header = "<|start|>" + " " * 280 + "!<|message|>"
    assert parse("harmony", header * 20) == [("content", (header * 20))]
