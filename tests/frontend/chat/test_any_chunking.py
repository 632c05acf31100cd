"""Random answers: any way to cut them says the same, none raises, and none loses or invents text."""

import json
import random

import pytest

FORMATS = [("hermes", "think"), ("llama3", "think"), ("mistral", "mistral"), ("none", "think")]
SPECIAL = ("<s>", "</s>", "[INST]", "[INSTX]", "[TOOL_CALLS]", "<|python_tag|>", "<think>")
PIECES = [
    *("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "</tool_call>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", *SPECIAL[:4]),
    *('{"name": "get", "arguments": {"a": 1}}', '{"name":"put","parameters":{"b":[{}],"c":"}"}}', '{"name": "get"'),
    *('"arguments": "{}"', '"name": "put"', '{"a": "\\u00e9', "get", "put"),
    *(
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        ";",
        '"',
        "\\",
        "<",
        "/",
        "null",
        "-1",
        "x",
        "é🙂",
        "word ",
        " ",
        "\n",
        "\n\n",
        "\x00",
    ),
]


def random_answer(rng):
    text = "".join(rng.choice(PIECES) for _ in range(rng.randrange(25)))
    if rng.random() < 0.5:  # half of a mark, anywhere
        start = rng.randrange(len(text) + 1)
        text = text[:start] + text[start + rng.randrange(4) :]
    return text


def random_cuts(rng, text):
    if rng.random() < 0.3:
        return range(len(text))
    return sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@pytest.mark.parametrize("seed", range(40))
def test_any_chunking_says_the_same(parse, tools, reasoning, seed):
    rng = random.Random(seed)
    for _ in range(50):
        text = random_answer(rng)
        settings = {
            "reasoning": rng.choice(["none", reasoning]),
            "prompt": rng.choice(["", "<think>\n", "[THINK]"]),
            "special_tokens": rng.choice([(), SPECIAL]),
        }
        whole = parse(tools, text, **settings)
        assert parse(tools, text, cuts=random_cuts(rng, text), **settings) == whole, text


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
@pytest.mark.parametrize("seed", range(10))
def test_an_answer_without_calls_comes_out_whole(parse, tools, reasoning, seed):
    rng = random.Random(seed)
    num_checked = 0
    for _ in range(50):
        text = random_answer(rng)
        parts = parse(tools, text)
        if any(part[0] == "call" for part in parts):
            continue
        num_checked += 1
        assert parts == ([("content", text)] if text else [])
    assert num_checked > 10


@pytest.mark.parametrize("tools", ["hermes", "mistral"])
@pytest.mark.parametrize("seed", range(30))
def test_calls_between_words_are_all_found(parse, tools, seed):
    rng = random.Random(seed)
    texts, expected = [], []
    for index in range(rng.randrange(1, 6)):
        if rng.random() < 0.5:
            words = rng.choice(["Some words", "a < b", "{}", '{"name": "get"}', "[1, 2]"]) + rng.choice(
                [".", " ", "\n\n"]
            )
            texts.append(words)
            expected.append(("content", words))
        arguments = json.dumps({rng.choice(["a", "é"]): rng.choice([1, "}]</tool_call>[TOOL_CALLS]", {"b": []}, None])})
        name = rng.choice(["get", "put", "not-offered"])
        if tools == "hermes":
            texts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n')
        elif rng.random() < 0.5:
            texts.append(f'[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]')
        else:
            texts.append(f"[TOOL_CALLS]{name}[ARGS]{arguments}")
        expected += [("call", index, name), ("arguments", index, arguments)]
    text = "".join(texts)
    found = parse(tools, text, cuts=random_cuts(rng, text))
    assert [strip(part) for part in found] == [strip(part) for part in parse.joined(expected)]


def strip(part):
    return ("content", part[1].strip()) if part[0] == "content" else part


@pytest.mark.parametrize(("tools", "reasoning"), FORMATS)
def test_repeated_marks_take_linear_time(parse, tools, reasoning):
    for piece in ("<tool_call>", "[TOOL_CALLS]", '<tool_call>{"x":"', "[TOOL_CALLS][{", "\n", '{"a":', "<think>"):
        text = piece * (200_000 // len(piece))
        assert parse(tools, text, cuts=range(0, len(text), 97), reasoning=reasoning) is not None
