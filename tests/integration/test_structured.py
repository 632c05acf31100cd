"""Structured output on the demo model, through the real pair: complete answers match, other requests are not affected.

The demo model has never seen JSON and samples at temperature 1, so only the grammar makes answers match. Most schemas
have short strings, so that answers end.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import openai
import pydantic
import pytest

from chairlift import AsyncClient, Client, GenerationError
from chairlift.v1 import generation_service_pb2 as pb
from tests.support.pair import PairAddress

SCHEMAS = json.loads((Path(__file__).parents[1] / "json_schemas.json").read_text())
NUM_AT_ONCE = 32
PROMPT = "Once upon a time there was a brave fox who "


async def run_all(target: str, requests: list[dict]) -> list[pb.GenerateResponse]:
    """Runs requests, NUM_AT_ONCE at a time, and returns their answers in order."""
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def run(client, options):
        async with slots:
            return await client.generate(PROMPT, temperature=1.0, return_token_ids=True, **options)

    async with AsyncClient(target) as client:
        return await asyncio.gather(*(run(client, options) for options in requests))


@pytest.mark.parametrize("num_requests", [32, pytest.param(500, marks=pytest.mark.slow)])
async def test_structured_answers_are_valid_and_do_not_change_others(pair: PairAddress, num_requests: int) -> None:
    schemas = list(itertools.islice(itertools.cycle(SCHEMAS.values()), num_requests))
    structured = [{"seed": seed, "max_tokens": 600, "json_schema": schema} for seed, schema in enumerate(schemas)]
    others = [{"seed": seed, "max_tokens": 48} for seed in range(num_requests // 5)]
    answers, beside = await asyncio.gather(run_all(pair.target, structured), run_all(pair.target, others))
    alone = await run_all(pair.target, others)
    assert [list(answer.token_ids) for answer in beside] == [list(answer.token_ids) for answer in alone]
    num_ended = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer.finished.reason == pb.FINISH_REASON_END_TOKEN:
            validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(json.loads(answer.text))
            num_ended += 1
        else:
            assert answer.finished.reason == pb.FINISH_REASON_MAX_TOKENS
    assert num_ended >= 0.9 * num_requests


ANSWERS = {
    "regex": ({"regex": "[A-Z]{3}-[0-9]{2,4}"}, "[A-Z]{3}-[0-9]{2,4}"),
    "choice": ({"choice": ["yes", "no", 'per"haps\n']}, 'yes|no|per"haps\n'),
    "Lark": ({"grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
    "GBNF": ({"grammar": 'root ::= [0-9]+ " " unit\nunit ::= "km" | "mi"'}, "[0-9]+ (km|mi)"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_all_answers_to_a_request_match_its_constraint(pair: PairAddress, case) -> None:
    constraint, pattern = ANSWERS[case]
    with Client(pair.target) as client:
        answer = client.generate(PROMPT, temperature=1.0, max_tokens=200, num_answers=4, seed=5, **constraint)
    answers = [answer, *answer.other_answers]
    assert all(one.finished.reason == pb.FINISH_REASON_END_TOKEN for one in answers)
    assert all(re.fullmatch(pattern, one.text) for one in answers)


def test_streamed_object_is_one(pair: PairAddress) -> None:
    with Client(pair.target) as client:
        with client.stream(
            PROMPT, temperature=1.0, seed=2, max_tokens=400, regex=r'\{"name": "[a-z]{3,9}"\}'
        ) as stream:
            text = "".join(chunk.text for chunk in stream)
        assert json.loads(text).keys() == {"name"}
        answer = client.generate(PROMPT, temperature=1.0, seed=2, max_tokens=8, json_object=True)
    assert answer.text.startswith("{")


def test_only_allowed_tokens_are_drawn(pair: PairAddress) -> None:
    with Client(pair.target) as client:
        allowed = list(client.count_tokens("a fox and a dog", return_token_ids=True).token_ids)
        answer = client.generate(
            PROMPT, allowed_token_ids=allowed, temperature=1.0, max_tokens=60, return_token_ids=True
        )
    assert set(answer.token_ids) <= set(allowed)
    assert len(set(answer.token_ids)) > 1
    assert answer.finished.reason == pb.FINISH_REASON_MAX_TOKENS, "no end token is among them"


def test_bad_words_are_never_written(pair: PairAddress) -> None:
    with Client(pair.target) as client:
        options = {"temperature": 0.0, "max_tokens": 80}
        words = re.findall(r"\w+", client.generate(PROMPT, **options).text)
        bad = sorted(set(words), key=words.count)[-8:]
        text = client.generate(PROMPT, bad_words=bad, **options).text
    assert not set(bad) & set(re.findall(r"\w+", text))
    assert text


@pytest.mark.slow
def test_constraint_that_takes_too_long_is_refused_and_the_pair_goes_on(pair: PairAddress) -> None:
    with Client(pair.target) as client:
        with pytest.raises(GenerationError, match="compiling it takes more than 2 s"):
            client.generate(PROMPT, grammar='start: %json {"type": "integer", "multipleOf": 1000003}')
        assert client.generate(PROMPT, choice=["so"]).text == "so"


def test_large_constraints_run_and_larger_ones_are_refused_before_any_token(pair: PairAddress) -> None:
    def members(number: int) -> dict:
        return {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(number)}}

    alternatives = "start: " + " | ".join(f'"p{i}" x' for i in range(2000)) + "\nx: /[a-z]{3}/"
    closed = {**members(666), "additionalProperties": False}
    with Client(pair.target) as client:
        for constraint in ({"json_schema": closed}, {"grammar": alternatives}, {"json_schema": members(666)}):
            answer = client.generate(PROMPT, temperature=1.0, seed=3, max_tokens=16, **constraint)
            assert answer.finished.reason in {pb.FINISH_REASON_END_TOKEN, pb.FINISH_REASON_MAX_TOKENS}
        with pytest.raises(GenerationError, match="too expensive to run") as caught:
            client.generate(PROMPT, json_schema=members(1300))
        assert caught.value.status.name == "INVALID_ARGUMENT"


class Place(pydantic.BaseModel):
    """An answer's type."""

    name: str = pydantic.Field(max_length=8)
    rivers: list[bool] = pydantic.Field(max_length=3)
    kind: str = pydantic.Field(pattern="^(town|village)$")


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def http(pair: PairAddress) -> Iterator[openai.OpenAI]:
    """OpenAI's client; the model's chat template says how calls are written."""
    with openai.OpenAI(base_url=pair.http_url, api_key="none", max_retries=0) as client:
        yield client


def test_pydantic_model_is_parsed(http: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me of a place."}]
    for seed in range(5):
        answer = http.chat.completions.parse(
            model="", messages=messages, response_format=Place, seed=seed, temperature=1, max_tokens=300
        )
        assert isinstance(answer.choices[0].message.parsed, Place)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_enforced_call_is_made_with_valid_arguments(http: openai.OpenAI, choice) -> None:
    messages = [{"role": "user", "content": "What is the weather?"}]
    answer = http.chat.completions.create(
        model="", messages=messages, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False, seed=1, n=4
    )
    for one in answer.choices:
        (call,) = one.message.tool_calls
        assert one.finish_reason == ("tool_calls" if choice == "required" else "stop")
        assert (one.message.content, call.function.name) == (None, "weather")
        jsonschema.validate(json.loads(call.function.arguments), WEATHER["function"]["parameters"])


def test_a_loop_of_tools_goes_on_after_their_results(http: openai.OpenAI) -> None:
    messages: list = [{"role": "developer", "content": "You know the weather."}, {"role": "user", "content": "Well?"}]
    options: dict = {"model": "", "tools": [WEATHER], "seed": 1, "max_tokens": 100}
    first = http.chat.completions.create(messages=messages, tool_choice="required", **options).choices[0]
    call = first.message.tool_calls[0]
    returned = first.message.model_dump(exclude_none=True) | {"provider_specific_fields": {"refusal": None}}
    messages += [returned, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    second = http.chat.completions.create(messages=messages, **options).choices[0]
    assert second.message.content
    assert second.finish_reason in ("stop", "length")


def test_words_that_exclude_every_constrained_answer_end_that_request_alone(pair: PairAddress) -> None:
    with Client(pair.target) as client:
        with pytest.raises(GenerationError) as caught:
            client.generate(PROMPT, choice=["x"], bad_words=["x"])
        assert caught.value.reason == "ENGINE_FAULT"
        assert client.generate(PROMPT, choice=["x"], bad_words=["y"]).text == "x"
