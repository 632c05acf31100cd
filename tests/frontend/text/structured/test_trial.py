"""What the engine could not run is refused before it sees it, and what it can run is not."""

import json
import random
import time

import pytest
from llguidance import LLTokenizer

from chairlift.service.structured.grammars import grammar_of
from chairlift.service.structured.output_constraint import ConstraintError, ConstraintKind
from frontend.text.structured import trial
from frontend.text.structured.trial import Trial
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE, byte_tokenizer_files


@pytest.fixture(scope="module")
def tokenizer():
    return LLTokenizer(byte_tokenizer_files()["tokenizer.json"].decode(), n_vocab=VOCAB_SIZE, eos_token=[END_TOKEN_ID])


def objects(num_members):
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num_members)}, "additionalProperties": False}


def alternatives(number):
    rules = "\n".join(f"x{i}: /[a-z]{{{i % 7 + 1}}}/" for i in range(number))
    return "start: " + " | ".join(f'"p{i}" x{i}' for i in range(number)) + "\n" + rules


RUNS = {
    "666 optional members": (ConstraintKind.JSON_SCHEMA, json.dumps(objects(666))),
    "2,000 alternatives": (ConstraintKind.GRAMMAR, alternatives(2000)),
    "2,000 values": (ConstraintKind.JSON_SCHEMA, json.dumps({"enum": [f"p{i}" for i in range(2000)]})),
    "2,000 alternatives of an expression": (ConstraintKind.REGEX, "|".join(f"p{i}[a-z]" for i in range(2000))),
}


@pytest.mark.parametrize("case", RUNS)
def test_large_constraint_runs(case, tokenizer, draw):
    grammar = grammar_of(*RUNS[case])
    Trial(tokenizer).run(grammar)
    draw(grammar, random.Random(case), max_tokens=40)


CANNOT_RUN = {
    "too many optional members": objects(1300),
    "the same inside": {"type": "object", "properties": {"a": {"type": "array", "items": objects(1300)}}}
    | {"required": ["a"]},
    "the same behind others": {**objects(3), "properties": {"x": {"const": 1}, "y": objects(1300)}, "required": ["y"]},
}


@pytest.mark.parametrize("case", CANNOT_RUN)
def test_schema_that_compiles_but_meets_a_limit_later_is_refused(case, tokenizer):
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(CANNOT_RUN[case]))
    with pytest.raises(ConstraintError, match=r"too expensive to run: .*max is 5000"):
        Trial(tokenizer).run(grammar)


def test_grammar_that_compiles_but_meets_a_limit_later_is_refused(tokenizer):
    grammar = grammar_of(ConstraintKind.GRAMMAR, 'start: "go" | "so" "it" rest\nrest: ' + alternatives(5500)[7:])
    with pytest.raises(ConstraintError, match="too expensive to run"):
        Trial(tokenizer).run(grammar)


def test_grammar_whose_steps_hold_everybody_up_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(trial, "_MAX_STEP_S", -1.0)  # however fast the machine
    with pytest.raises(ConstraintError, match="one step under it takes"):
        Trial(tokenizer).run(grammar_of(ConstraintKind.JSON_SCHEMA, "{}"))


def test_endless_grammar_is_tried_to_an_end(tokenizer):
    Trial(tokenizer).run(grammar_of(ConstraintKind.GRAMMAR, 'start: "a" start | "b" start'))
    with pytest.raises(ConstraintError):  # the library looks ahead for what must follow
        Trial(tokenizer).run(grammar_of(ConstraintKind.GRAMMAR, 'start: "a" start'))


def test_trial_is_deterministic(tokenizer):
    grammar = grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(objects(1300)))
    said = set()
    for _ in range(3):
        with pytest.raises(ConstraintError) as caught:
            Trial(tokenizer).run(grammar)
        said.add(str(caught.value))
    assert len(said) == 1


def test_trial_of_a_usual_schema_takes_milliseconds_of_cpu(tokenizer):
    """Less than a tenth of the time limit of compiling, on a machine that is ten times slower than those of today."""
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10)}}
    tried, began_s = Trial(tokenizer), time.process_time()
    tried.run(grammar_of(ConstraintKind.JSON_SCHEMA, json.dumps(schema)))
    assert time.process_time() - began_s < 0.2
