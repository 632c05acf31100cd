"""Structured output over HTTP, through OpenAI's own client: the grammar that the engine gets, and refused requests."""

import json
import re

import openai
import pydantic
import pytest
import tokenizers

from frontend.api.http.output_constraint import schema_constraint
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

ECHO = "{{ messages[0].content }}"
HERMES = ECHO + "{# <tool_call> #}"
THINKING = ECHO + "{# </think> #}"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name, parameters=SCHEMA):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def named(name):
    return {"type": "function", "function": {"name": name}}


def user(text="hi"):
    return [{"role": "user", "content": text}]


@pytest.fixture
def connect_to(shared_pairs):
    """connect_to(template) -> a client of a model with this chat template, and its engine."""

    async def connect(template):
        pair, client = await shared_pairs(template)
        return client, pair.engine

    return connect


def grammars(engine):
    """The parts of the grammar that the engine was given last."""
    return json.loads(engine.submissions[-1].grammar)["grammars"]


async def test_json_schema_is_enforced_and_parsed_into_a_model(connect_to):
    class Place(pydantic.BaseModel):
        city: str

    client, engine = await connect_to(ECHO)
    answer = await client.chat.completions.parse(model="fake", messages=user('{"city": "Rom"}'), response_format=Place)
    assert answer.choices[0].message.parsed == Place(city="Rom")
    (grammar,) = grammars(engine)
    assert grammar["json_schema"]["properties"]["city"]["type"] == "string"
    assert grammar["json_schema"]["additionalProperties"] is False


CONSTRAINTS = {
    "json_object": {"response_format": {"type": "json_object"}},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured json as a text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "structured json_object": {"structured_outputs": {"json_object": True}},
    "structured regex": {"structured_outputs": {"regex": "a+"}},
    "structured choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "structured grammar": {"structured_outputs": {"grammar": 'start: "x"'}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": {"guided_regex": "a+"},
    "guided_choice": {"guided_choice": ["a", "b"]},
    "guided_grammar": {"guided_grammar": 'root ::= "x"'},
}


@pytest.mark.parametrize("case", CONSTRAINTS)
async def test_both_endpoints_take_every_parameter_for_structured_output(shared_pair, shared_client, case):
    await shared_client.completions.create(model="fake", prompt="a", extra_body=CONSTRAINTS[case])
    first = shared_pair.engine.submissions[-1].grammar
    await shared_client.chat.completions.create(model="fake", messages=user(), extra_body=CONSTRAINTS[case])
    assert shared_pair.engine.submissions[-1].grammar == first != ""


@pytest.mark.parametrize(
    ("response_format", "guided"),
    [
        ({"type": "json_object", "schema": SCHEMA}, {"guided_json": SCHEMA}),
        ({"type": "json_object", "schema": {}}, {"response_format": {"type": "json_object"}}),
        ({"type": "json", "value": SCHEMA}, {"guided_json": SCHEMA}),
        ({"type": "json", "value": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
        ({"type": "regex", "value": "a+"}, {"guided_regex": "a+"}),
    ],
)
async def test_response_format_of_llama_cpp_and_tgi_is_enforced(shared_pair, shared_client, response_format, guided):
    for body in ({"response_format": response_format}, guided):
        await shared_client.chat.completions.create(model="fake", messages=user(), extra_body=body)
    ours, same = (submission.grammar for submission in shared_pair.engine.submissions)
    assert ours == same != ""


async def test_response_format_text_is_no_constraint(shared_pair, shared_client):
    await shared_client.chat.completions.create(model="fake", messages=user(), response_format={"type": "text"})
    assert shared_pair.engine.submissions[-1].grammar == ""


async def test_allowed_ids_and_bad_words_are_passed_on(shared_pair, shared_client):
    extra = {"allowed_token_ids": [5, 3], "bad_words": ["x"]}
    await shared_client.completions.create(model="fake", prompt="a", extra_body=extra)
    sampling = shared_pair.engine.submissions[-1].sampling
    assert list(sampling.allowed_token_ids) == [3, 5]
    assert [len(sequence.token_ids) for sequence in sampling.bad_sequences] == [1, 2]


async def test_parameters_of_a_required_call_are_enforced_and_parsed(connect_to):
    client, engine = await connect_to(HERMES)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
    answer = await client.chat.completions.create(
        model="fake", messages=user(call), tools=[tool("weather"), tool("news")], tool_choice="required"
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"
    assert answer.choices[0].finish_reason == "tool_calls"
    lark, *schemas = grammars(engine)
    assert "weather" in lark["lark_grammar"]
    assert "news" in lark["lark_grammar"]
    assert [schema["json_schema"]["required"] for schema in schemas] == [["city"], ["city"]]


@pytest.mark.parametrize(("shown", "several"), [("", False), ("{{ tools }}", True)])
async def test_a_model_that_is_not_shown_its_tools_makes_one_call(connect_to, shown, several):
    client, engine = await connect_to(HERMES + shown)
    await client.chat.completions.create(model="fake", messages=user(), tools=[tool("news")], tool_choice="required")
    (calls,) = re.findall("^calls: .*", grammars(engine)[0]["lark_grammar"], re.MULTILINE)
    assert calls.endswith(")*") is several


async def test_named_call_leaves_only_its_tool(connect_to):
    client, engine = await connect_to(HERMES)
    await client.chat.completions.create(
        model="fake", messages=user(), tools=[tool("weather"), tool("news")], tool_choice=named("news")
    )
    lark, _ = grammars(engine)
    assert "weather" not in lark["lark_grammar"]
    assert "start: calls\ncalls: call\n" in lark["lark_grammar"], "one call"


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(("mode", "enforced"), [("auto", False), ("required", True)])
async def test_only_allowed_tools_are_shown_and_may_be_required(connect_to, mode, enforced):
    client, engine = await connect_to(HERMES + "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}")
    answer = await client.chat.completions.create(
        model="fake",
        messages=user(),
        tools=[tool("weather"), tool("news"), tool("time")],
        tool_choice=allowed(mode, "time", "news"),
    )
    assert answer.choices[0].message.content == "hi<news><time>"
    assert bool(engine.submissions[-1].grammar) is enforced
    if enforced:
        lark, *schemas = grammars(engine)
        assert "weather" not in lark["lark_grammar"]
        assert len(schemas) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_call_of_a_named_function_ends_with_stop_as_openais_does(connect_to, stream):
    client, _ = await connect_to(HERMES)
    call = '<tool_call>\n{"name": "news", "arguments": {"city": "Rom"}}\n</tool_call>'
    answer = await client.chat.completions.create(
        model="fake", messages=user(call), tools=[tool("news")], tool_choice=named("news"), stream=stream
    )
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    assert any((choice.delta if stream else choice.message).tool_calls for choice in choices)
    assert choices[-1].finish_reason == "stop"


async def test_constraint_beside_optional_tools_allows_either(connect_to):
    client, engine = await connect_to(HERMES)
    await client.chat.completions.create(
        model="fake", messages=user(), tools=[tool("weather")], response_format={"type": "json_object"}
    )
    lark, *schemas = grammars(engine)
    assert lark["lark_grammar"].startswith("start: calls | @answer\n")
    assert [schema["name"] for schema in schemas] == ["arguments_0", "answer"]


@pytest.mark.parametrize("choice", ["required", named("weather")])
async def test_a_required_call_leaves_no_text_to_constrain(connect_to, choice):
    client, engine = await connect_to(HERMES)
    call = {"messages": user(), "tools": [tool("weather")], "tool_choice": choice}
    text_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    await client.chat.completions.create(model="fake", **call)
    await client.chat.completions.create(model="fake", **call, response_format=text_format)
    alone, beside_format = (submission.grammar for submission in engine.submissions)
    assert beside_format == alone != ""


async def test_reasoning_may_come_before_a_constrained_answer(connect_to):
    client, engine = await connect_to(THINKING)
    answer = await client.chat.completions.create(
        model="fake", messages=user('<think>hm</think>{"a":1}'), response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.reasoning_content == "hm"
    assert answer.choices[0].message.content == '{"a":1}'
    before, constraint = grammars(engine)
    assert "/think>" in before["lark_grammar"]
    assert constraint["name"] == "constraint"


SEATS = {"type": "object", "properties": {"seats": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}}}
OPEN = {"type": "object", "properties": {"to": {"type": "object", "properties": {"city": {"type": "string"}}}}}


@pytest.mark.parametrize("choice", ["required", named("book")])
async def test_refused_keyword_of_a_tool_is_named_with_the_tool_and_the_property(connect_to, choice):
    client, engine = await connect_to(HERMES)
    tools = [tool("weather"), tool("news"), tool("book", SEATS)]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=user(), tools=tools, tool_choice=choice)
    assert "tools[2].function 'book': properties.seats.uniqueItems: cannot enforce a schema" in caught.value.message
    assert not engine.submissions


async def test_tool_whose_parameters_nothing_satisfies_is_named(connect_to):
    client, _ = await connect_to(HERMES)
    empty = {"properties": {"a": {"type": "integer", "minimum": 5, "maximum": 3}}, "required": ["a"]}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.function 'book': Unsatisfiable schema"):
        await client.chat.completions.create(
            model="fake", messages=user(), tools=[tool("weather"), tool("book", empty)], tool_choice="required"
        )


async def test_objects_of_tools_and_strict_schemas_have_no_members_but_those_they_name(connect_to):
    client, engine = await connect_to(HERMES)
    await client.chat.completions.create(
        model="fake", messages=user(), tools=[tool("book", OPEN), tool("now", {})], tool_choice="required"
    )
    _, book, now = grammars(engine)
    assert book["json_schema"]["additionalProperties"] is False
    assert book["json_schema"]["properties"]["to"]["additionalProperties"] is False
    assert now["json_schema"]["additionalProperties"] is False
    for strict in (True, False, None):
        schema = {"name": "x", "schema": OPEN, "strict": strict}
        for tools in ([], [tool("book", OPEN)]):
            await client.chat.completions.create(
                model="fake",
                messages=user(),
                response_format={"type": "json_schema", "json_schema": schema},
                tools=tools or openai.omit,
            )
            answer = grammars(engine)[-1]["json_schema"]
            assert ("additionalProperties" in answer) == (strict is True)
            assert ("additionalProperties" in answer["properties"]["to"]) == (strict is True)


async def test_constraint_that_compiles_but_cannot_run_is_refused_before_any_token(connect_to):
    client, engine = await connect_to(ECHO)
    for num_members, runs in ((666, True), (1300, False)):
        schema = {"type": "object", "properties": {f"p{number}": {} for number in range(num_members)}}
        response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        create = client.chat.completions.create(model="fake", messages=user(), response_format=response_format)
        if runs:
            await create
        else:
            with pytest.raises(openai.BadRequestError, match="too expensive to run"):
                await create
    assert len(engine.submissions) == 1


HARMONY = ECHO + "<|start|>assistant{# <|channel|> <|message|> #}"
HARMONY_TOKENS = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"]


@pytest.fixture
async def harmony(make_pair, connect):
    """A client of a model whose marks of messages are special tokens, as gpt-oss's are, and its engine."""
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer_files()["tokenizer.json"].decode())
    tokenizer.add_special_tokens(HARMONY_TOKENS)
    files = {**byte_tokenizer_files(HARMONY), "tokenizer.json": tokenizer.to_str().encode()}
    pair = await make_pair(engine=FakeEngine(files=files, vocab_size=300), http=True)
    return connect(pair), pair.engine


THOUGHT = "<|channel|>analysis<|message|>Hm.<|start|>assistant"


async def test_messages_of_harmony_are_separated(harmony):
    client, _ = harmony
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}<|call|>'
    answer = await client.chat.completions.create(model="fake", messages=user(THOUGHT + call), tools=[tool("weather")])
    message = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (None, "Hm.")
    assert [(made.function.name, made.function.arguments) for made in message.tool_calls] == [
        ("weather", '{"city": "Rom"}')
    ]
    answer = await client.chat.completions.create(
        model="fake", messages=user(THOUGHT + "<|channel|>final<|message|>Yes.")
    )
    assert (answer.choices[0].message.content, answer.choices[0].message.reasoning_content) == ("Yes.", "Hm.")


async def test_constraints_of_harmony_include_the_header_of_their_message(harmony):
    client, engine = harmony
    json_object = {"type": "json_object"}
    for asked, starts in (
        ({"response_format": json_object}, {"before": "final", "constraint": None}),
        (
            {"tools": [tool("weather")], "tool_choice": "required"},
            {"before": "analysis", "constraint": "functions.weather"},
        ),
        ({"tools": [tool("weather")], "response_format": json_object}, {"before": "analysis", "constraint": "@answer"}),
    ):
        await client.chat.completions.create(model="fake", messages=user("<|end|>"), **asked)
        before, constraint, *_ = grammars(engine)
        (rule,) = [line for line in before["lark_grammar"].splitlines() if line.startswith("before:")]
        assert ("final" in rule) == (starts["before"] == "final")
        assert "analysis" in before["lark_grammar"]
        assert starts["constraint"] is None or starts["constraint"] in constraint["lark_grammar"]


NO_FORM = [
    ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "regex", "value": {"a": 1}}}, "response_format", "needs a value of type string"),
    ({"response_format": {"type": "json", "value": "{"}}, "response_format", "not valid JSON"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format",
        "needs json_schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "null"}}}}},
        "response_format",
        "^Error code: 400 - response_format cannot be served: cannot enforce a schema with not",
    ),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "not 2"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least one"),
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": "x" * 65537}, "guided_json", "guided_json has 65537 bytes, at most 65536"),
    ({"guided_choice": ["a", ""]}, "guided_choice", "none may be empty"),
    ({"guided_grammar": "x"}, "guided_grammar", "guided_grammar cannot be served"),
    (
        {"guided_regex": "a", "guided_choice": ["a"]},
        "guided_choice",
        "guided_regex and guided_choice do not go together",
    ),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ignore_eos excludes structured output"),
    ({"allowed_token_ids": [258]}, "allowed_token_ids", "vocabulary"),
    ({"bad_words": ["x"] * 65}, "bad_words", "at most 64"),
]


@pytest.mark.parametrize(("body", "param", "words"), NO_FORM)
async def test_invalid_output_formats_are_named(shared_client, body, param, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await shared_client.chat.completions.create(model="fake", messages=user(), extra_body=body)
    assert caught.value.param == param


NO_CALL = [
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"tool_choice": "any", "tools": [tool("f")]}, "tool_choice", "must be 'none', 'auto', 'required'"),
    ({"tool_choice": {"type": "function"}, "tools": [tool("f")]}, "tool_choice", "function's name"),
    ({"tool_choice": named("g"), "tools": [tool("f")]}, "tool_choice", "names 'g', which is not in tools"),
    ({"tool_choice": allowed("auto", "g"), "tools": [tool("f")]}, "tool_choice", "names 'g', which is not in tools"),
    ({"tool_choice": allowed("any", "f"), "tools": [tool("f")]}, "tool_choice", "'allowed_tools', a mode and tools"),
    ({"tool_choice": allowed("auto") | {"tools": [1]}, "tools": [tool("f")]}, "tool_choice", "there are no tools"),
    ({"tool_choice": "required", "tools": [tool("f"), tool("ä b")]}, "tools", "letters, digits"),
    ({"tool_choice": "required", "tools": [tool("f", [1])]}, "tools", "JSON object"),
    (
        {"tool_choice": "required", "tools": [tool("f", {"not": {"type": "null"}})]},
        "tools",
        "cannot enforce a schema with not",
    ),
    ({"tool_choice": "required", "tools": [tool("f", {"title": "x" * 65536})]}, "tools", "at most 65536"),
    ({"tools": [tool("f")], "guided_regex": "a"}, "guided_regex", "only with JSON output"),
]


@pytest.mark.parametrize(("body", "param", "words"), NO_CALL)
async def test_call_that_cannot_be_enforced_is_named(connect_to, body, param, words):
    client, engine = await connect_to(HERMES)
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await client.chat.completions.create(model="fake", messages=user(), extra_body=body)
    assert caught.value.param == param
    assert not engine.submissions


async def test_tools_of_a_model_without_calls_are_refused(connect_to):
    client, _ = await connect_to(ECHO)
    with pytest.raises(openai.BadRequestError, match="no known format of tool calls"):
        await client.chat.completions.create(model="fake", messages=user(), tools=[tool("f")], tool_choice="required")


async def test_schema_is_measured_in_the_bytes_of_utf8(connect_to):
    client, engine = await connect_to(HERMES)
    schema = {**SCHEMA, "description": "字" * 21_000}
    for body in ({"guided_json": schema}, {"tools": [tool("f", schema)], "tool_choice": "required"}):
        await client.chat.completions.create(model="fake", messages=user(), extra_body=body)
    assert len(engine.submissions) == 2


async def test_half_a_surrogate_pair_in_a_refused_schema_is_escaped(shared_client):
    schema = {"properties": {"\ud800": {"not": {"type": "null"}}}}
    constraint = schema_constraint(schema, "guided_json")
    assert json.loads(constraint.text) == schema
    body = {"guided_json": constraint.text}
    with pytest.raises(openai.BadRequestError, match=r"properties\.\\ud800\.not: cannot enforce a schema with not"):
        await shared_client.chat.completions.create(model="fake", messages=user(), extra_body=body)
