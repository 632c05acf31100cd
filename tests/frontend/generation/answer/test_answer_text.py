"""The text of an answer does not depend on how its tokens were batched."""

import random

import pytest

from chairlift.service.end_reason import EndReason
from frontend.generation.answer.answer_text import AnswerText
from frontend.request.request import GenerationRequest, OutputOptions, SamplingOptions, StopOptions, TokenPrompt
from frontend.routing.stream import RequestEnd, TokenBatch
from frontend.text.tokenizer import Tokenizer
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, byte_tokenizer_files


@pytest.fixture
def tokenizer():
    tokenizer = Tokenizer(byte_tokenizer_files())
    yield tokenizer
    tokenizer.close()


def make_request(*, stop_texts=(), include=False, text=True, keep=False, min_tokens=0):
    return GenerationRequest(
        "id",
        TokenPrompt((1,)),
        SamplingOptions(seed=0),
        StopOptions(stop_texts=tuple(stop_texts), include_stop_text=include, min_tokens=min_tokens),
        OutputOptions(text, token_ids=False, top_logprobs=None, keep_special_tokens=keep),
        priority=0,
        cache_salt="",
        num_answers=1,
    )


def end(reason=EndReason.MAX_TOKENS):
    return RequestEnd(reason, 0, 1, 0, 0)


def batches(ids, sizes, reason=EndReason.MAX_TOKENS):
    start = 0
    for size in sizes:
        yield TokenBatch(start, ids[start : start + size], None, None)
        start += size
    yield TokenBatch(start, ids[start:], None, end(reason))


async def test_any_batching_gives_the_same_text_and_count(tokenizer):
    rng = random.Random(3)
    words = "雪だるま ☃ stop héllo sto p wörld "
    for _ in range(300):
        text = "".join(rng.choice(words) for _ in range(40)) + "stop" + "".join(rng.choice(words) for _ in range(9))
        ids = await tokenizer.encode(text)
        request = make_request(stop_texts=["stop", "w\u00f6rld st"], include=rng.random() < 0.5)
        outcomes = set()
        for sizes in ([], [1] * len(ids), [rng.randrange(9) for _ in range(12)]):
            answer, parts, num_tokens, stop_text = AnswerText(request, tokenizer), [], 0, None
            for batch in batches(ids, sizes):
                delta = answer.push(batch)
                parts.append(delta.text)
                num_tokens += delta.num_tokens
                if delta.stop_text is not None:
                    stop_text = delta.stop_text
                    break
            outcomes.add(("".join(parts), num_tokens, stop_text))
        assert len(outcomes) == 1
        (outcome,) = outcomes
        assert outcome[2] in ("stop", "w\u00f6rld st")
        assert text.startswith(outcome[0])


async def test_half_a_character_at_the_end_becomes_a_replacement(tokenizer):
    ids = (await tokenizer.encode("a☃"))[:-1]
    assert AnswerText(make_request(), tokenizer).push(TokenBatch(0, ids, None, end())).text == "a\ufffd"


@pytest.mark.parametrize(
    ("reason", "keep", "text"),
    [
        (EndReason.END_TOKEN, False, "ab"),
        (EndReason.END_TOKEN, True, "ab<|end|>"),
        (EndReason.STOP_TOKEN, True, "ab"),
        (EndReason.MAX_TOKENS, True, "ab<|end|>"),
        (EndReason.MAX_TOKENS, False, "ab"),
    ],
)
@pytest.mark.parametrize("stop_texts", [(), ("zzz",)])
@pytest.mark.parametrize("sizes", [[], [3], [1, 2]])
async def test_token_that_ends_the_answer(tokenizer, reason, keep, text, stop_texts, sizes):
    ids = [*await tokenizer.encode("ab"), END_TOKEN_ID]
    answer = AnswerText(make_request(keep=keep, stop_texts=stop_texts), tokenizer, end_token_ids=[END_TOKEN_ID])
    deltas = [answer.push(batch) for batch in batches(ids, sizes, reason)]
    assert ("".join(delta.text for delta in deltas), sum(delta.num_tokens for delta in deltas)) == (text, 3)


async def test_end_token_that_is_a_mark_has_text(tokenizer):
    ids = [*await tokenizer.encode("ab"), END_TOKEN_ID]
    answer = AnswerText(make_request(), tokenizer, marks=frozenset({END_TOKEN_ID}))
    assert answer.push(TokenBatch(0, ids, None, end(EndReason.END_TOKEN))).text == "ab<|end|>"


async def test_stop_texts_are_matched_without_text_output(tokenizer):
    ids = await tokenizer.encode("abcdef")
    delta = AnswerText(make_request(stop_texts=["cd"], text=False), tokenizer).push(TokenBatch(0, ids, None, None))
    assert delta == ("", 4, "cd")
    delta = AnswerText(make_request(text=False), tokenizer).push(TokenBatch(0, ids, None, end()))
    assert delta == ("", 6, None)


async def test_held_back_text_comes_out_at_the_end(tokenizer):
    answer = AnswerText(make_request(stop_texts=["abcx"]), tokenizer)
    ids = await tokenizer.encode("zabc")
    assert answer.push(TokenBatch(0, ids, None, None)).text == "z"
    assert answer.push(TokenBatch(4, [], None, end())) == ("abc", 0, None)


@pytest.mark.parametrize("sizes", [[], [1] * 9, [3, 4]])
@pytest.mark.parametrize(
    ("min_tokens", "text", "stop_text"),
    [(0, "a", "xy"), (2, "a", "xy"), (3, "axy", "xy"), (4, "axy", "xy"), (5, "axyxyb", "z"), (7, "axyxybzcd", None)],
)
async def test_stop_texts_within_min_tokens_do_not_end_the_answer(tokenizer, sizes, min_tokens, text, stop_text):
    ids = await tokenizer.encode("axyxybzcd")
    answer = AnswerText(make_request(stop_texts=["xy", "z"], min_tokens=min_tokens), tokenizer)
    deltas = []
    for batch in batches(ids, sizes):
        deltas.append(answer.push(batch))
        if deltas[-1].stop_text is not None:
            break
    assert ("".join(delta.text for delta in deltas), deltas[-1].stop_text) == (text, stop_text)
    assert sum(delta.num_tokens for delta in deltas) == len(text + (stop_text or ""))


@pytest.mark.parametrize(("min_tokens", "stop_text"), [(1, "\ufffd"), (2, None)])
async def test_half_a_character_within_min_tokens_matches_no_stop_text(tokenizer, min_tokens, stop_text):
    ids = (await tokenizer.encode("☃"))[:2]
    answer = AnswerText(make_request(stop_texts=["\ufffd"], min_tokens=min_tokens), tokenizer)
    assert answer.push(TokenBatch(0, ids, None, end())).stop_text == stop_text
