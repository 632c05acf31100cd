"""Grammar rules for required calls: the format's parser reads texts drawn from them as valid calls."""

import json
import random

import jsonschema
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintKind
from frontend.errors import InvalidRequest
from frontend.limits import MAX_CONSTRAINT_BYTES
from frontend.text.chat import CallableTool, ToolCallArguments, ToolCallStart, chat_format
from frontend.text.chat.families import CALL_FAMILIES
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files

TOOLS = [
    CallableTool(
        "get_weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    CallableTool("a.b-c", {"properties": {"unit": {"enum": ["C", "F"]}}, "additionalProperties": False}),
]
TEMPLATES = {
    "hermes": "<tool_call>",
    "llama3": '<|start_header_id|> "parameters"',
    "mistral": "[TOOL_CALLS]",
    "mistral with names": "[TOOL_CALLS] [ARGS]",
    "deepseek_v3": "<｜tool▁sep｜> ```json",
    "deepseek_v31": "<｜tool▁sep｜>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "granite": "<|tool_call|>",
    "phi4_mini": "functools[",
    "glm45": "<arg_key>",
    "qwen3_coder": "<tool_call> <function= <parameter=",
    "harmony": "<|channel|> <|message|>",
}
ONE_CALL_ONLY = {"harmony"}  # a call ends the answer


def no_special_tokens(text: str) -> None:
    return None


def grammar(style, *, one_only=False, token_id=no_special_tokens):
    rules = chat_format(TEMPLATES[style]).call_rules(TOOLS, token_id, one_only=one_only)
    parts = {
        "lark": f"start: calls\n{rules.lark}",
        "schemas": rules.schemas,
        "closed": list(rules.schemas),
        "places": {},
    }
    return grammar_of(ConstraintKind.PARTS, json.dumps(parts))


def calls_in(style, text):
    """Returns the name and arguments of each parsed call; fails if the text contains anything else."""
    parser = chat_format(TEMPLATES[style]).parser(tools={tool.name: tool.parameters for tool in TOOLS})
    calls = []
    for delta in [*parser.feed(text), *parser.finish()]:
        match delta:
            case ToolCallStart():
                calls.append([delta.name, ""])
            case ToolCallArguments():
                calls[-1][1] += delta.text
            case _:
                pytest.fail(f"{delta} is not a call")
    return [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("one_only", [True, False])
@pytest.mark.parametrize("style", TEMPLATES)
def test_drawn_texts_are_parsed_as_calls_with_valid_arguments(style, one_only, draw):
    rng = random.Random(style)
    texts = [draw(grammar(style, one_only=one_only), rng, max_tokens=2000) for _ in range(12)]
    parameters = {tool.name: tool.parameters for tool in TOOLS}
    numbers = []
    for text in filter(None, texts):
        calls = calls_in(style, text)
        numbers.append(len(calls))
        for name, arguments in calls:
            assert isinstance(arguments, dict)
            jsonschema.Draft202012Validator(parameters[name]).validate(arguments)
    assert len(numbers) >= 9
    assert (set(numbers) == {1}) if one_only or style in ONE_CALL_ONLY else (min(numbers) == 1 < max(numbers))


ONE = {
    "hermes": '<tool_call>\n{"name": "a.b-c", "arguments": {"unit": "C"}}\n</tool_call>',
    "llama3": '{"name": "a.b-c", "parameters": {"unit": "C"}}',
    "mistral": '[TOOL_CALLS][{"name": "a.b-c", "arguments": {"unit": "C"}}]',
    "mistral with names": '[TOOL_CALLS]a.b-c[ARGS]{"unit": "C"}',
    "deepseek_v3": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a.b-c\n```json\n{"unit": "C"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a.b-c<｜tool▁sep｜>{"unit": "C"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.a.b-c:0<|tool_call_argument_begin|>"
    '{"unit": "C"}<|tool_call_end|><|tool_calls_section_end|>',
    "granite": '<|tool_call|>[{"name": "a.b-c", "arguments": {"unit": "C"}}]',
    "phi4_mini": 'functools[{"name": "a.b-c", "arguments": {"unit": "C"}}]',
    "glm45": "<tool_call>a.b-c\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=a.b-c>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.a.b-c <|constrain|>json<|message|>{"unit": "C"}',
}


@pytest.mark.parametrize("style", TEMPLATES)
def test_rules_allow_the_format_that_models_write(style, keeps_to):
    assert keeps_to(grammar(style), ONE[style])
    assert not keeps_to(grammar(style), "Well. " + ONE[style])
    assert not keeps_to(grammar(style), ONE[style].replace("a.b-c", "b.b-c"))
    assert not keeps_to(grammar(style), ONE[style].replace("C", "K"))


@pytest.mark.parametrize("style", TEMPLATES)
def test_two_calls_are_allowed_unless_only_one_is(style, keeps_to):
    if style in ONE_CALL_ONLY or "llama" in style:
        return
    if style in ("glm45", "qwen3_coder"):
        text = "\n".join([ONE[style]] * 2)
    else:
        family = CALL_FAMILIES[style.replace(" with ", "_")]
        one = ONE[style].removeprefix(family.before).removesuffix(family.after)
        text = family.before + family.between.join([one, one]) + family.after
    assert keeps_to(grammar(style), text)
    assert not keeps_to(grammar(style, one_only=True), text)
    assert len(calls_in(style, text)) == 2


def glm_call(arguments):
    written = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments.items()]
    return f"<tool_call>f\n{''.join(written)}</tool_call>"


def qwen_call(arguments):
    written = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function=f>\n{''.join(written)}</function>\n</tool_call>"


MARKED = [("glm45", glm_call), ("qwen3_coder", qwen_call)]


def marked_grammar(style, parameters):
    rules = chat_format(TEMPLATES[style]).call_rules([CallableTool("f", parameters)], no_special_tokens, one_only=True)
    parts = {
        "lark": f"start: calls\n{rules.lark}",
        "schemas": rules.schemas,
        "closed": list(rules.schemas),
        "places": {},
    }
    return grammar_of(ConstraintKind.PARTS, json.dumps(parts))


@pytest.mark.parametrize(("style", "write"), MARKED)
def test_marked_arguments_follow_their_schema(style, write, keeps_to):
    names = {"a": {"type": "string", "minLength": 2, "maxLength": 3}, "b": {"type": "string"}, "c": {"const": "x<y"}}
    others = {"d": {"$ref": "#/$defs/d"}, "e": {"type": ["integer", "null"]}}
    parameters = {"$defs": {"d": {"enum": [1, 2]}}, "properties": {**names, **others}, "required": ["b", "f"]}
    held = marked_grammar(style, parameters)

    def call(**arguments):
        return write(arguments)

    for arguments in ({}, {"a": "xy"}, {"c": "x<y"}, {"d": "2", "e": "null"}, {"b": "two\nlines <b>"}):
        assert keeps_to(held, call(**dict(sorted({"b": "t", "f": "[1]", **arguments}.items()))))
    for arguments in ({"a": "x"}, {"a": "wxyz"}, {"c": "y"}, {"d": "3"}, {"e": "x"}, {"f": "x"}, {"g": "1"}):
        assert not keeps_to(held, call(**dict(sorted({"b": "t", "f": "[1]", **arguments}.items()))))
    assert not keeps_to(held, call(b="t"))
    assert not keeps_to(held, call(f="[1]", b="t")), "another order"


UNIONS = [
    {"anyOf": [{"const": "x"}, {"const": "yz"}]},
    {"oneOf": [{"type": "string", "enum": ["x"]}, {"anyOf": [{"const": "yz"}]}]},
    {"$ref": "#/$defs/u"},
    {"type": "string", "enum": [1, "x", "yz"]},
]


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize("union", UNIONS)
def test_union_of_texts_allows_only_these(style, write, union, keeps_to):
    definition = {"anyOf": [{"const": "x"}, {"const": "yz"}, {"$ref": "#/$defs/u"}]}
    parameters = {"$defs": {"u": definition}, "properties": {"a": union}, "required": ["a"]}
    held = marked_grammar(style, parameters)
    for text in ("x", "yz"):
        assert keeps_to(held, write({"a": text}))
    for text in ("", "xx", "z", "1"):
        assert not keeps_to(held, write({"a": text}))


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
WHOLE = {
    "the parameters": (
        {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}, "b": {"type": "null"}}, "required": ["a"]},
        ([], [{"a": []}], [{"a": [], "b": None}]),
        ([[]], [1], [{}], [{"a": [[]]}], {"a": []}),
    ),
    "another argument": (
        {"properties": {"b": POINT, "a": {"$ref": "#/properties/b"}}, "required": ["a"]},
        ({"x": 1},),
        ({}, {"x": None}, 1),
    ),
    "a definition that refers to the parameters": (
        {"$defs": {"d": {"type": "array", "items": {"$ref": "#"}}}, "properties": {"a": {"$ref": "#/$defs/d"}}}
        | {"required": ["a"]},
        ([], [{"a": []}]),
        ([[]], [{}]),
    ),
}


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize("case", WHOLE)
def test_argument_may_refer_to_any_part_of_the_parameters(style, write, case, keeps_to):
    members, right, wrong = WHOLE[case]
    parameters = {"type": "object", **members}
    held, validator = marked_grammar(style, parameters), jsonschema.Draft202012Validator(parameters)
    for value in (*right, *wrong):
        assert validator.is_valid({"a": value}) == (value in right)
        assert keeps_to(held, write({"a": json.dumps(value)})) == (value in right), value


def test_rules_contain_only_the_definitions_that_an_argument_reaches():
    definitions = {"d": {"type": "array", "items": {"$ref": "#/$defs/e"}}, "e": {"type": "integer"}, "f": {}}
    properties = {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/d"}, "c": {"$ref": "#/definitions/g/items"}}
    parameters = {"properties": properties, "$defs": definitions, "definitions": {"g": {"items": {}}, "h": {}}}
    rules = chat_format(TEMPLATES["glm45"]).call_rules(
        [CallableTool("f", parameters)], no_special_tokens, one_only=True
    )
    assert list(rules.schemas.values()) == [
        properties["a"],
        {**properties["b"], "$defs": {"d": definitions["d"], "e": definitions["e"]}},
        {**properties["c"], "definitions": {"g": {"items": {}}}},
    ]


REPEATED = {
    "the parameters": {"properties": {"a0": {}, **{f"a{i}": {"$ref": "#/properties/a0"} for i in range(1, 500)}}},
    "a definition": {"$defs": {"d": {"enum": list(range(300))}}}
    | {"properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(300)}},
    "a type of text": {"$defs": {"d": {"anyOf": [{"type": "string"}] * 300}}}
    | {"properties": {f"a{i}": {"$ref": "#/$defs/d"} for i in range(300)}},
    "their rules": {"required": [f"a{i}" for i in range(2000)]},
}


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize("case", REPEATED)
def test_arguments_that_repeat_too_much_are_refused_before_all_are_written(style, write, case):
    parameters = REPEATED[case]
    assert len(json.dumps(parameters)) < MAX_CONSTRAINT_BYTES // 2
    with pytest.raises(InvalidRequest, match="the rules for their arguments have more than 65536 bytes"):
        marked_grammar(style, parameters)


NAMES = ["a>b", "a<b", "a\nb", " a", "a\n", "a</arg_key>b", "a" * 1000, "a-b c", '"{}"', "ä" * 999]


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize("name", NAMES)
def test_argument_is_refused_if_its_name_cannot_be_marked(style, write, name, keeps_to):
    parameters = {"properties": {name: {"type": "integer"}}, "required": [name]}
    parser = chat_format(TEMPLATES[style]).parser(tools={"f": parameters})
    deltas = [*parser.feed(write({name: 5})), *parser.finish()]
    read = "".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments))
    if json.loads(read or "{}") == {name: 5}:
        assert keeps_to(marked_grammar(style, parameters), write({name: 5}))
    else:
        with pytest.raises(InvalidRequest, match="has a name that cannot be marked"):
            marked_grammar(style, parameters)


A_OR_B = {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
TOGETHER = [
    {"properties": {"a": {}, "b": {}}, **A_OR_B},
    {"anyOf": [{"properties": {"a": {}}, "required": ["a"]}]},
    {"oneOf": [{"properties": {"a": {"const": 1}}, "required": ["a"]}]},
    {"allOf": [{"properties": {"a": {}}, "required": ["a"]}, {"properties": {"b": {}}, "required": ["b"]}]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {}, "b": {}}, **A_OR_B}}},
    {"properties": {"a": {}}, "minProperties": 1},
]


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize("parameters", TOGETHER)
def test_arguments_that_are_restricted_together_are_refused(style, write, parameters, keeps_to):
    assert not jsonschema.Draft202012Validator(parameters).is_valid({})
    with pytest.raises(InvalidRequest, match=r"a call of 'f' cannot be enforced .* its parameters have \w+Of|minProp"):
        assert not keeps_to(marked_grammar(style, parameters), write({}))


@pytest.mark.parametrize(("style", "write"), MARKED)
@pytest.mark.parametrize(
    "limits", [{}, {"minLength": 1}, {"minLength": 1, "maxLength": 50_000}, {"maxLength": 50_000}, {"minLength": 400}]
)
def test_marks_are_no_part_of_an_enforced_string(style, write, limits, keeps_to):
    held = marked_grammar(style, {"properties": {"a": {"type": "string", **limits}}, "required": ["a"]})
    marks = CALL_FAMILIES[style].argument_marks
    lines = "x < y\n  </p>\n" * 40
    assert keeps_to(held, write({"a": lines}))
    assert keeps_to(held, write({"a": ""})) == ("minLength" not in limits)
    assert not keeps_to(held, write({"a": f"{lines}{marks.value_end}{lines}"}))
    assert not keeps_to(held, write({"a": marks.value_end}))
    if "maxLength" not in limits and limits != {"minLength": 400}:
        for mark in marks.value_ends:
            assert not keeps_to(held, write({"a": f"{lines}{mark}{lines}"})), mark


@pytest.mark.parametrize("limits", [{}, {"minLength": 2, "maxLength": 9}])
def test_strings_with_line_breaks_are_parsed_within_their_limits(limits, draw):
    names = {"a": {"type": "string", "enum": ["\nx", "y\n", ""]}, "b": {"type": "string", **limits}}
    parameters = {"properties": names, "required": ["a"]}
    held, rng = marked_grammar("qwen3_coder", parameters), random.Random(1)
    texts = list(filter(None, [draw(held, rng, max_tokens=2000) for _ in range(30)]))
    for text in [*texts, *(qwen_call({"a": "y\n", "b": value}) for value in ("", "ab", "a\n", "\n\n"))]:
        parser = chat_format(TEMPLATES["qwen3_coder"]).parser(tools={"f": parameters})
        deltas = [*parser.feed(text), *parser.finish()]
        arguments = json.loads("".join(delta.text for delta in deltas if isinstance(delta, ToolCallArguments)))
        if text in texts:
            jsonschema.Draft202012Validator(parameters).validate(arguments)
        else:
            assert qwen_call(arguments) == text
    assert len(texts) > 8


def test_harmony_allows_reasoning_before_calls_and_final_messages(keeps_to):
    harmony, prompt = chat_format(TEMPLATES["harmony"]), "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    thought = "<|channel|>analysis<|message|>2 < 3<|end|><|start|>assistant"
    answer = grammar_of(ConstraintKind.REGEX, "[a-z]+", harmony.before_answer(prompt, no_special_tokens))
    for text in ("<|channel|>final<|message|>so", thought + "<|channel|>final<|message|>so"):
        assert keeps_to(answer, text)
    for text in ("so", thought + "so", thought + "<|channel|>final<|message|>1"):
        assert not keeps_to(answer, text)
    rules = harmony.call_rules(TOOLS, no_special_tokens, one_only=False)
    parts = {"lark": f"start: calls | {harmony.answer_start(no_special_tokens)} @answer\n{rules.lark}"}
    schemas = {**rules.schemas, "answer": {"type": "integer"}}
    text = json.dumps({**parts, "schemas": schemas, "closed": [], "places": {}})
    either = grammar_of(ConstraintKind.PARTS, text, harmony.before_calls(prompt, no_special_tokens))
    for text in (ONE["harmony"], thought + ONE["harmony"], thought + "<|channel|>final<|message|>12"):
        assert keeps_to(either, text)
    assert not keeps_to(either, "12")
    inside = prompt + "<|channel|>final<|message|>So "
    assert harmony.before_answer(inside, no_special_tokens) == ""


def test_marks_that_are_special_tokens_are_matched_as_tokens():
    ids = {"[TOOL_CALLS]": 5, "[ARGS]": 9}
    rules = chat_format(TEMPLATES["mistral with names"]).call_rules(TOOLS, ids.get, one_only=True)
    assert "<[5]>" in rules.lark
    assert "<[9]>" in rules.lark
    assert "TOOL" not in rules.lark


THINKS = "</think>"


def before(prompt, token_id=no_special_tokens):
    rules = chat_format(THINKS).before_answer(prompt, token_id)
    return grammar_of(ConstraintKind.REGEX, "[a-z ]{1,9}", rules)


def test_reasoning_is_optional_unless_the_prompt_opened_it(keeps_to):
    for text in ("so", "<think>hm</think>so", "<think>\n2 < 3\n</think>\n\nso"):
        assert keeps_to(before("hi"), text)
    for text in ("<think>hm", "hm</think>so", "<think>hm</think>So"):
        assert not keeps_to(before("hi"), text)
    for text in ("hm</think>so", "\n2 < 3\n</think>\n\nso"):
        assert keeps_to(before("hi<think>\n"), text)
    for text in ("so", "hm</think>So", "hm"):
        assert not keeps_to(before("hi<think>\n"), text)


@pytest.fixture
def special_vocabulary():
    """Returns a vocabulary with one token per byte and two marks as special tokens, and the ids of these."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())
    marks = ["<think>", "</think>"]
    tokenizer.add_special_tokens(marks)
    vocabulary = LLTokenizer(tokenizer.to_str(), eos_token=[END_TOKEN_ID])
    return vocabulary, {mark: tokenizer.token_to_id(mark) for mark in marks}


def accepts(vocabulary, grammar, token_ids):
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_reasoning_marks_may_be_special_tokens(special_vocabulary):
    vocabulary, ids = special_vocabulary
    thinks = chat_format(THINKS)
    opened = grammar_of(ConstraintKind.REGEX, "ab", thinks.before_answer("<think>", ids.get))
    free = grammar_of(ConstraintKind.REGEX, "ab", thinks.before_answer("", ids.get))
    opening, closing = ids["<think>"], ids["</think>"]
    hm, answer = vocabulary.tokenize_str("hm"), vocabulary.tokenize_str("ab")
    assert accepts(vocabulary, opened, [*hm, closing, *answer])
    assert accepts(vocabulary, opened, [closing, *answer])
    assert not accepts(vocabulary, opened, answer)
    assert accepts(vocabulary, free, answer)
    assert accepts(vocabulary, free, [opening, *hm, closing, *answer])
    assert not accepts(vocabulary, free, [*hm, closing, *answer])


def test_format_without_reasoning_has_no_rules_for_it():
    assert chat_format("").before_answer("hi", no_special_tokens) == ""
