"""Tokens billed equal tokens sent: readers stop in different ways at random points and count what they got."""

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import ClientStalled
from frontend.generation.deadline import Deadline
from tests.support.frontend.fake_engine import FakeEngine

WAYS = {"to the end": "stop", "leave": "cancelled", "stall": "cancelled", "cancelled": "cancelled", "broken": "error"}
"""Ways to read an answer, with the outcome that each counts as."""


async def read(generations, spec, way, num_sends, seen):
    """Reads an answer as a server does, up to `num_sends` messages, and adds the tokens and the outcome to `seen`.

    The answer may end earlier, because a slow reader gets many tokens in one message.
    """
    num_running = spec.num_answers
    async with generations.open(spec, Deadline.at(None)) as answers:
        messages = answers.messages()
        async for message in messages:
            num_running -= message.HasField("finished")
            if way != "to the end" and num_sends <= 0 and num_running:
                seen[WAYS[way]] += 1
                if way == "leave":
                    return
                if way == "stall":
                    raise ClientStalled("reads nothing")
                if way == "cancelled":
                    raise asyncio.CancelledError
                raise OSError("socket closed")
            await asyncio.sleep(0)  # the send
            num_sends -= 1
            seen["prompt"] += message.started.num_prompt_tokens
            seen["output"] += message.chunk.num_tokens
            assert not message.HasField("finished") or message.finished.usage.num_prompt_tokens == 40
    seen["stop"] += 1


@pytest.mark.parametrize("num_answers", [1, 3])
async def test_tokens_billed_equal_tokens_sent(make_pair, text_request, scrape, num_answers):
    pair = await make_pair(engine=FakeEngine(tokens_per_step=3))
    rng = random.Random(7)
    seen = Counter()

    async def one():
        way, num_sends = rng.choice(tuple(WAYS)), rng.randrange(12)
        spec = text_request("x" * 40, max_tokens=60).spec
        spec.num_answers = num_answers
        with contextlib.suppress(ClientStalled, asyncio.CancelledError, OSError):
            await read(pair.app._generations, spec, way, num_sends, seen)

    for _ in range(6):
        await asyncio.gather(*(one() for _ in range(20)))
    await pair.idle()
    ends = scrape(pair.app.metrics, "chairlift:request_success_total", "finished_reason")
    assert {word: ends[word] for word in WAYS.values()} == {word: seen[word] for word in WAYS.values()}
    assert all(seen[word] for word in WAYS.values())
    assert sum(ends.values()) == 120
    assert scrape(pair.app.metrics, "chairlift:generation_tokens_total") == seen["output"]
    assert scrape(pair.app.metrics, "chairlift:request_generation_tokens_sum") == seen["output"]
    assert scrape(pair.app.metrics, "chairlift:prompt_tokens_total") == seen["prompt"]


async def test_unary_call_bills_all_tokens_or_none(make_pair, text_request, scrape):
    pair = await make_pair()
    for num_messages in (5, 1000):
        async with pair.app._generations.open(
            text_request("x" * 40).spec, Deadline.at(None), streamed=False
        ) as answers:
            async for _ in answers.messages():
                num_messages -= 1
                if not num_messages:
                    break
    await pair.idle()
    assert scrape(pair.app.metrics, "chairlift:generation_tokens_total") == 41
    assert scrape(pair.app.metrics, "chairlift:prompt_tokens_total") == 40


async def test_request_is_cancelled_if_its_reader_leaves_before_the_last_of_several_answers(
    make_pair, text_request, scrape
):
    pair = await make_pair()
    spec = text_request("abc").spec
    spec.num_answers = 2
    async with pair.app._generations.open(spec, Deadline.at(None)) as answers:
        async for message in answers.messages():
            if message.HasField("finished"):
                break
    await pair.idle()
    ends = scrape(pair.app.metrics, "chairlift:request_success_total", "finished_reason")
    assert ends["cancelled"] == 1
    assert sum(ends.values()) == 1


async def test_request_without_output_bills_only_its_prompt(make_pair, text_request, ended, billed):
    pair = await make_pair()
    request = text_request("x" * 40, output=pb.OutputOptions(prompt_logprobs=1), max_tokens=0)
    async with pair.app._generations.open(request.spec, Deadline.at(None)) as answers:
        events = [message.WhichOneof("event") async for message in answers.messages()]
    await pair.idle()
    assert events == ["started", "finished"]
    assert (ended(pair), billed(pair)) == ({"length": 1}, (40, 0))
