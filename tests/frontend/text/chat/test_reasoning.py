"""Reasoning at the start of an answer is separated from the content."""

import pytest

from frontend.text.chat import ContentText, ReasoningText, chat_format
from frontend.text.chat.reasoning import ReasoningMarks

OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        ("", "<think>\nI see.\n\nGood.\n</think>\n\nYes.\n", [("reasoning", "I see.\n\nGood."), ("content", "Yes.\n")]),
        ("", "\n <think>a</think>b", [("reasoning", "a"), ("content", "b")]),
        ("", "<think>\n\n</think>\n\nNo thoughts", [("content", "No thoughts")]),
        ("", "<think> only thoughts\n", [("reasoning", " only thoughts\n")]),
        ("", "<think>ends in a mark</thi", [("reasoning", "ends in a mark</thi")]),
        ("", "<think>\n", []),
        ("", "<think>a</think>", [("reasoning", "a")]),
        ("", "No <think>mark</think> inside", [("content", "No <think>mark</think> inside")]),
        ("", " <thin", [("content", " <thin")]),
        ("", "</think>alone", [("content", "</think>alone")]),
        ("", "<think>a</think>b<think>c</think>", [("reasoning", "a"), ("content", "b<think>c</think>")]),
        (OPENED, "I see.\n</think>\n\nYes.", [("reasoning", "I see."), ("content", "Yes.")]),
        (OPENED, "<think>\nagain</think>Yes.", [("reasoning", "again"), ("content", "Yes.")]),
        (OPENED, "never ends", [("reasoning", "never ends")]),
        (OPENED, "<th", [("reasoning", "<th")]),
        (OPENED, "\n\n", []),
        ("<think>\n\n</think>\n\n", "Yes.", [("content", "Yes.")]),
        ("what is <think>?", "Yes.", [("content", "Yes.")]),
    ],
)
def test_reasoning_is_separated(parse, prompt, text, parts):
    assert parse("none", text, reasoning="think", prompt=prompt) == parts
    assert parse("none", text, cuts=range(len(text)), reasoning="think", prompt=prompt) == parts


def test_reasoning_and_content_are_streamed():
    parser = chat_format(None, reasoning="think").parser()
    assert parser.feed("<think>\nOne") == [ReasoningText("One")]
    assert parser.feed(" two\n") == [ReasoningText(" two")]
    assert parser.feed("three </") == [ReasoningText("\nthree ")]
    assert parser.feed("think>\n") == []
    assert parser.feed("Yes") == [ContentText("Yes")]
    assert parser.feed("\n ") == [ContentText("\n ")]
    assert parser.finish() == []


def test_calls_in_the_reasoning_are_reasoning(parse):
    call = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    parts = parse("hermes", f"<think>\nmaybe {call}?\n</think>\n\n{call}", reasoning="think")
    assert parts == [("reasoning", f"maybe {call}?"), ("call", 0, "get"), ("arguments", 0, "{}")]


def test_mistral_has_its_own_marks(parse):
    parts = parse("mistral", "[THINK]a[/THINK]b", reasoning="mistral")
    assert parts == [("reasoning", "a"), ("content", "b")]


def test_opening_mark_at_the_end_of_the_prompt_opens_the_reasoning():
    marks = ReasoningMarks("<think>", "</think>")
    assert marks.opened_by("...<think>\n")
    assert not marks.opened_by("...<think>\n\n</think>\n\n")
    assert not marks.opened_by("")


GRANITE = [
    ("<think>Hm.</think>\n<response>Yes.</response>", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("<think>Hm.</think><response>\nYes.", [("reasoning", "Hm."), ("content", "Yes.")]),
    ("<think>Hm.</think>Yes, <response> is a mark.", [("reasoning", "Hm."), ("content", "Yes, <response> is a mark.")]),
    ("<response>Yes.</response>", [("content", "<response>Yes.</response>")]),
    ("<think>Hm.</think><resp", [("reasoning", "Hm."), ("content", "<resp")]),
    ("<think>Hm.</think><response>Yes.</resp", [("reasoning", "Hm."), ("content", "Yes.</resp")]),
]


@pytest.mark.parametrize(("text", "parts"), GRANITE)
def test_granite_marks_the_answer_too(parse, text, parts):
    for cuts in ((), range(len(text))):
        assert parse("none", text, cuts=cuts, reasoning="granite") == parts


def test_granite_32_uses_phrases_as_marks(parse):
    text = "Here is my thought process:\n\nHm.\n\nHere is my response:\n\nYes."
    for cuts in ((), range(len(text))):
        assert parse("none", text, cuts=cuts, reasoning="granite32") == [("reasoning", "Hm."), ("content", "Yes.")]
