"""Random answers: the parsed result does not depend on the chunks, no answer raises, and no text is lost."""

import random

import pytest

FORMATS = [("hermes", "think"), ("llama3", "think"), ("mistral", "mistral"), ("none", "think")]
FORMATS += [("deepseek_v3", "think"), ("deepseek_v31", "think"), ("kimi_k2", "think"), ("granite", "granite")]
FORMATS += [("phi4_mini", "granite32"), ("glm45", "think"), ("qwen3_coder", "think"), ("harmony", "harmony")]
PIECES_OF = {
    "deepseek_v3": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>get\n```json\n", "```", "function"),
        *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ],
    "deepseek_v31": [
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>get<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *("<｜tool▁calls▁end｜>", "<｜tool▁sep｜>"),
    ],
    "kimi_k2": [
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.get:0", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>", "functions.", ":1"),
    ],
    "granite": ["<|tool_call|>", "<|tool_call|>[", "<response>", "</response>", "Here is my response:"],
    "phi4_mini": [
        *("functools", "functools[", "<|tool_call|>", "<|/tool_call|>", "Here is my thought process:"),
        "Here is my response:",
    ],
    "glm45": [
        *("<tool_call>get\n", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<arg_key>text</arg_key>"),
        *("<arg_value>true</arg_value>", "</tool_call>"),
    ],
    "qwen3_coder": [
        *("<tool_call>\n<function=get>\n", "<function=get>", "<parameter=a>\n", "<parameter=text>\n", "</parameter>"),
        *("\n</parameter>\n", "<parameter=", "\n<parameter=text>\ntrue", "</function>\n</tool_call>", "</function>"),
        *("</tool_call>", "\n"),
    ],
    "harmony": [
        *("<|start|>assistant", "<|channel|>analysis", "<|channel|>final", "<|message|>", "<|end|>", "<|call|>"),
        *("<|channel|>commentary to=functions.get <|constrain|>json<|message|>", "to=python", "assistant", "<|start|>"),
    ],
}
PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<s>", "</s>"),
    *('{"name": "get", "arguments": {"a": 1}}', '{"name":"put","parameters":{"b":[{}],"c":"}"}}', '{"name": "get"'),
    *('"arguments": "{}"', '"name": "put"', '{"a": "\\u00e9', "get", "put"),
    *'{}[],:;"\\</x \n\x00',
    *("null", "-1", "é🙂", "word ", "\n\n"),
]


def random_answer(rng, tools):
    own = PIECES_OF.get(tools, ())
    text = "".join(rng.choice(own if own and rng.random() < 0.5 else PIECES) for _ in range(rng.randrange(25)))
    if rng.random() < 0.5:  # half of a mark, anywhere
        start = rng.randrange(len(text) + 1)
        text = text[:start] + text[start + rng.randrange(4) :]
    return text


def random_cuts(rng, text):
    if rng.random() < 0.3:
        return range(len(text))
    return sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_result_does_not_depend_on_chunking(parse, tools, reasoning):
    rng = random.Random(tools)
    for _ in range(500):
        text = random_answer(rng, tools)
        settings = {
            "reasoning": rng.choice(["none", reasoning]),
            "prompt": rng.choice(["", "<think>\n", "[THINK]", "<|start|>assistant", "<|channel|>analysis<|message|>"]),
            "names": rng.choice([("get", "put"), {"get": {"properties": {"text": {"type": "string"}}}}, ()]),
        }
        whole = parse(tools, text, **settings)
        assert parse(tools, text, cuts=random_cuts(rng, text), **settings) == whole, text


@pytest.mark.parametrize(("tools", "reasoning"), [pair for pair in FORMATS if pair[0] != "harmony"])
def test_answer_without_calls_is_content(parse, tools, reasoning):
    rng = random.Random(tools)
    num_checked = 0
    for _ in range(300):
        text = random_answer(rng, tools)
        parts = parse(tools, text)
        if any(part[0] == "call" for part in parts):
            continue
        num_checked += 1
        assert parts == ([("content", text)] if text else [])
    assert num_checked > 50


@pytest.mark.parametrize("num_chars", [10_000, pytest.param(200_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_repeated_marks_neither_recurse_nor_take_quadratic_time(parse, tools, reasoning, num_chars):
    pieces = ["<tool_call>", "[TOOL_CALLS]", '<tool_call>{"x":"', "[TOOL_CALLS][{", "\n", '{"a":', "<think>"]
    for piece in [*pieces, *PIECES_OF.get(tools, ())]:
        text = piece * (num_chars // len(piece))
        assert parse(tools, text, cuts=range(0, len(text), 97), reasoning=reasoning) is not None
