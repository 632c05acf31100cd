"""Parameters that vLLM and llama.cpp have beyond OpenAI's: each has its effect."""

import json
from array import array
from typing import Any

import openai
import pytest

from frontend.text.tokenizer import Tokenizer
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

TOKENIZER = Tokenizer(byte_tokenizer_files())
A = 64  # id of "a"


def ids_of(text: str) -> list[int]:
    """Token ids of lower-case letters."""
    return [A + ord(char) - ord("a") for char in text]


def prompt_of(submission: Any) -> str:
    """The prompt that an engine was given."""
    return b"".join(map(TOKENIZER.token_bytes, array("I", submission.prompt_ids))).decode()


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def complete(client: openai.AsyncOpenAI, prompt: Any, **body: Any) -> Any:
    return await client.completions.create(model="fake", prompt=prompt, extra_body=body)


@pytest.fixture
def connect_to(shared_pairs):
    """connect_to(template) -> a client of a model with this template and 64 tokens of context, and its engine."""

    async def connect(template: str = "{{ messages[0].content }}"):
        pair, client = await shared_pairs(template, max_model_len=64)
        return client, pair.engine

    return connect


@pytest.mark.parametrize(
    ("prompt", "body", "kept"),
    [
        ("abcdef", {"truncate_prompt_tokens": 2}, "ef"),
        ("abcdef", {"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ("abcdef", {"truncate_prompt_tokens": 6}, "abcdef"),
        ("abcdef", {"truncate_prompt_tokens": None, "truncation_side": "left"}, "abcdef"),
        ("ab" * 1000, {"truncate_prompt_tokens": -1}, "ab" * 24),  # 64 less the 16 tokens of an answer
        ("ab" * 1000, {"truncate_prompt_tokens": -1, "max_tokens": 60}, "ab" * 2),
        (ids_of("abcdef"), {"truncate_prompt_tokens": 3}, "def"),
        (ids_of("ab" * 1000), {"truncate_prompt_tokens": -1, "max_tokens": 2}, "ab" * 31),
    ],
)
async def test_truncated_prompts_keep_their_last_tokens_or_the_first(connect_to, prompt, body, kept):
    client, engine = await connect_to()
    answer = await complete(client, prompt, echo=True, **body)
    assert prompt_of(engine.submissions[-1]) == kept
    assert answer.choices[0].text.startswith(kept)
    assert answer.usage.prompt_tokens == len(kept)


async def test_a_conversation_is_truncated_after_its_template(connect_to):
    client, engine = await connect_to("{{ messages[0].content }}<user>")
    body = {"truncate_prompt_tokens": 8}
    await client.chat.completions.create(model="fake", messages=user("x" * 1000), extra_body=body)
    assert prompt_of(engine.submissions[-1]) == "xx<user>"


@pytest.mark.parametrize(("value", "words"), [(0, "at least 1, or -1"), (-2, "greater than or equal to -1")])
async def test_truncation_to_nothing_is_refused(shared_client, value, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        await complete(shared_client, "a", truncate_prompt_tokens=value)
    assert caught.value.param == "truncate_prompt_tokens"


async def test_a_truncated_prompt_that_leaves_no_room_is_refused(connect_to):
    client, _ = await connect_to()
    with pytest.raises(openai.BadRequestError, match="maximum context length is 64"):
        await complete(client, "a" * 100, truncate_prompt_tokens=63, max_tokens=10)


@pytest.fixture
async def with_bos(make_pair, connect):
    """A client and its engine, of a model whose tokenizer puts a token before a text: "a"."""
    tokenizer = json.loads(byte_tokenizer_files()["tokenizer.json"])
    first, text = {"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"a": {"id": "a", "ids": [A], "tokens": ["a"]}},
    }
    files = byte_tokenizer_files("{{ messages[0].content }}") | {"tokenizer.json": json.dumps(tokenizer).encode()}
    pair = await make_pair(engine=FakeEngine(files=files), http=True)
    return connect(pair), pair.engine


@pytest.mark.parametrize(("value", "text", "chat"), [(None, "ab", "b"), (True, "ab", "ab"), (False, "b", "b")])
async def test_special_tokens_are_added_to_texts_and_on_request_to_conversations(with_bos, value, text, chat):
    client, engine = with_bos
    await complete(client, "b", add_special_tokens=value)
    await client.chat.completions.create(model="fake", messages=user("b"), extra_body={"add_special_tokens": value})
    assert list(map(prompt_of, engine.submissions)) == [text, chat]
    tokenizing = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    for prompt, read in (({"prompt": "b"}, text), ({"messages": user("b")}, chat)):
        answer: Any = await tokenizing.post("/tokenize", body={**prompt, "add_special_tokens": value}, cast_to=object)
        assert answer["tokens"] == ids_of(read)


async def test_log_probabilities_name_tokens_by_their_ids(shared_client):
    body = {"return_tokens_as_token_ids": True, "logprobs": 1}
    logprobs = (await complete(shared_client, "ab", **body)).choices[0].logprobs
    assert logprobs.tokens[:2] == [f"token_id:{A}", f"token_id:{A + 1}"]
    assert all(name.startswith("token_id:") for top in logprobs.top_logprobs for name in top)
    echoed = (await complete(shared_client, "ab", echo=True, max_tokens=0, **body)).choices[0].logprobs
    assert echoed.tokens == [f"token_id:{A}", f"token_id:{A + 1}"]


@pytest.mark.parametrize("stream", [False, True])
async def test_log_probabilities_of_a_chat_name_tokens_by_their_ids(connect_to, stream):
    client, _ = await connect_to()
    answer = await client.chat.completions.create(
        model="fake",
        messages=user("ab"),
        logprobs=True,
        top_logprobs=1,
        stream=stream,
        extra_body={"return_tokens_as_token_ids": True},
    )
    choices = [event.choices[0] async for event in answer] if stream else answer.choices
    rows = [row for choice in choices if choice.logprobs for row in choice.logprobs.content]
    assert [row.token for row in rows[:2]] == [f"token_id:{A}", f"token_id:{A + 1}"]
    assert [row.bytes for row in rows[:2]] == [[97], [98]]
    assert all(top.token.startswith("token_id:") for row in rows for top in row.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [None, True, False])
async def test_reasoning_can_be_left_out(connect_to, stream, value):
    client, _ = await connect_to("{{ messages[0].content }}{# </think> #}")
    answer = await client.chat.completions.create(
        model="fake",
        messages=user("<think>hm</think>so"),
        stream=stream,
        extra_body={"include_reasoning": value},
    )
    parts = [event.choices[0].delta async for event in answer] if stream else [answer.choices[0].message]
    assert "".join(part.content or "" for part in parts).strip() == "so"
    thoughts = "".join(getattr(part, "reasoning_content", "") for part in parts)
    assert thoughts.strip() == ("" if value is False else "hm")


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_of_a_chat_starts_with_the_continued_message(connect_to, stream):
    client, _ = await connect_to("{{ messages[-1].content }}")
    messages = [*user("hi"), {"role": "assistant", "content": "Well, "}]

    async def content(**body: Any) -> str:
        answer = await client.chat.completions.create(
            model="fake", messages=messages, n=2, stream=stream, extra_body=body
        )
        if not stream:
            return answer.choices[1].message.content
        events = [event.choices[0] async for event in answer]
        return "".join(choice.delta.content or "" for choice in events if choice.index == 1)

    assert await content(echo=True, continue_final_message=True) == "Well, Well, "
    assert await content(continue_final_message=True) == "Well, "
    messages.append({"role": "user", "content": "yes"})
    assert await content(echo=True) == "yes"


# llama.cpp's names.


@pytest.mark.parametrize(
    ("body", "length"),
    [
        ({"n_predict": 3}, 3),
        ({"n_predict": -1}, 40),
        ({"n_predict": -1, "max_completion_tokens": 2}, 40),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 1, "max_completion_tokens": 2}, 1),
        ({}, 16),
    ],
)
async def test_n_predict_is_max_tokens_and_minus_one_what_fits(shared_client, body, length):
    answer = await complete(shared_client, "x" * 40, **body)
    assert answer.choices[0].text == "x" * length


async def test_n_predict_limits_chats_too(connect_to):
    client, engine = await connect_to()
    for body in ({"n_predict": 3}, {"n_predict": -1, "max_tokens": 2}):
        await client.chat.completions.create(model="fake", messages=user("hi"), extra_body=body)
    assert [submission.stops.max_tokens for submission in engine.submissions] == [3, 62]


async def test_repeat_penalty_is_repetition_penalty(shared_client, shared_pair):
    await complete(shared_client, "a", repeat_penalty=1.5)
    await complete(shared_client, "a", repeat_penalty=1.5, repetition_penalty=2.0)
    sent = [submission.sampling.repetition_penalty for submission in shared_pair.engine.submissions]
    assert sent == [1.5, 2.0]


async def test_seed_of_minus_one_is_random(shared_client, shared_pair):
    for _ in range(2):
        await shared_client.completions.create(model="fake", prompt="a", seed=-1)
    first, second = (submission.sampling.seed for submission in shared_pair.engine.submissions)
    assert first != second


async def test_without_cache_prompt_no_prompt_shares_its_cache(shared_client, shared_pair):
    for value in (False, False, True, None):
        await complete(shared_client, "a", cache_prompt=value)
    salts = [submission.cache_salt for submission in shared_pair.engine.submissions]
    assert len(set(salts[:2])) == 2
    assert all(salts[:2])
    assert not any(salts[2:])


async def test_n_probs_requests_log_probabilities(shared_client, connect_to):
    logprobs = (await complete(shared_client, "ab", n_probs=1)).choices[0].logprobs
    assert len(logprobs.top_logprobs[0]) == 1
    assert (await complete(shared_client, "ab", n_probs=0)).choices[0].logprobs is None
    chatting, _ = await connect_to()
    answer = await chatting.chat.completions.create(model="fake", messages=user("a"), extra_body={"n_probs": 2})
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@pytest.mark.parametrize(
    ("constraint", "held_to"),
    [
        ({"grammar": 'root ::= "yes" | "no"'}, "lark_grammar"),
        ({"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}, "json_schema"),
    ],
)
async def test_llama_cpp_grammar_and_json_schema_constrain_the_answer(shared_client, shared_pair, constraint, held_to):
    await complete(shared_client, "a", **constraint)
    (grammar,) = json.loads(shared_pair.engine.submissions[-1].grammar)["grammars"]
    assert held_to in grammar
    await complete(shared_client, "a", grammar="", json_schema=None)
    assert not shared_pair.engine.submissions[-1].grammar


async def test_invalid_grammar_is_refused_by_its_parameter(shared_client):
    with pytest.raises(openai.BadRequestError, match="grammar cannot be served") as caught:
        await complete(shared_client, "a", grammar="root ::= missing")
    assert caught.value.param == "grammar"
