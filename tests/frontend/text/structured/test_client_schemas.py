"""Schemas as clients send them are taken: OpenAI's examples, pydantic, instructor, LangChain, zod, the AI SDK, MCP."""

import json
import random
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLTokenizer

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintKind
from frontend.text.chat import CallableTool, chat_format
from frontend.text.structured.trial import Trial
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files

SCHEMAS = json.loads((Path(__file__).parents[3] / "client_schemas.json").read_text())
KINDS = {
    "schema": ConstraintKind.JSON_SCHEMA,
    "strict": ConstraintKind.STRICT_JSON_SCHEMA,
    "tool": ConstraintKind.STRICT_JSON_SCHEMA,
}


@pytest.fixture(scope="module")
def trial():
    return Trial(
        LLTokenizer(byte_tokenizer_files()["tokenizer.json"].decode(), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN_ID])
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_to_a_schema_of_a_client_are_valid(name, trial, draw):
    kind, schema = SCHEMAS[name]["kind"], SCHEMAS[name]["schema"]
    grammar, rng = grammar_of(KINDS[kind], json.dumps(schema)), random.Random(name)
    trial.run(grammar)
    texts = [text for _ in range(12) if (text := draw(grammar, rng)) is not None]
    assert len(texts) >= 3
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    for text in texts:
        validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(text))


@pytest.mark.parametrize("name", [name for name, entry in SCHEMAS.items() if entry["kind"] == "tool"])
def test_tool_of_a_client_can_be_called(name, trial):
    tools = [CallableTool("book", SCHEMAS[name]["schema"])]
    rules = chat_format("<tool_call>").call_rules(tools, lambda text: None, one_only=True)
    parts = {"lark": f"start: calls\n{rules.lark}", "schemas": rules.schemas, "closed": list(rules.schemas)}
    trial.run(grammar_of(ConstraintKind.PARTS, json.dumps({**parts, "places": {}})))
