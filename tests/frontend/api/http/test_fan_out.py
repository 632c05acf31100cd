"""Many prompts in one body: all are admitted or none, and a call larger than the queue is not retryable."""

import asyncio

import aiohttp
import pytest

from frontend.api.http import fan_out as play


@pytest.fixture
async def post():
    async with aiohttp.ClientSession() as session:

        async def send(pair, **body):
            url = f"http://127.0.0.1:{pair.app.http_port}/v1/completions"
            async with session.post(url, json={"max_tokens": 1, **body}) as response:
                return response.status, await response.json()

        yield send


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"prompt": ["x"] * 6}, "6 prompts with 1 answers each are 6 requests, and at most 5", "prompt"),
        ({"prompt": ["x"] * 3, "n": 2}, "3 prompts with 2 answers each are 6 requests, and at most 5", "prompt"),
        ({"prompt": "x", "n": 6}, "6 answers are requested, and at most 5", "n"),
        ({"prompt": "x" * 101}, "the prompt has 101 tokens, and in all at most 100", "prompt"),
        ({"prompt": [7] * 101}, "the prompt has 101 tokens, and in all at most 100", "prompt"),
    ],
)
async def test_call_larger_than_the_queue_is_400_with_the_numbers(make_pair, post, body, message, param):
    pair = await make_pair(http=True, max_queued_requests=5, max_queued_tokens=100)
    status, answer = await post(pair, **body)
    assert status == 400, answer
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == param
    assert not pair.engine.submissions


async def test_call_that_exceeds_the_queue_starts_none_of_its_prompts(make_pair, post):
    pair = await make_pair(http=True, max_queued_requests=5)
    pair.engine.pause()
    first = asyncio.create_task(post(pair, prompt=["x"] * 3))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == 3)
    status, answer = await post(pair, prompt=["x"] * 3)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert len(pair.engine.submissions) == 3
    pair.engine.resume()
    assert (await first)[0] == 200


async def test_2048_prompts_are_served_by_default_a_few_hundred_at_a_time(make_pair, post):
    pair = await make_pair(http=True)
    pair.engine.pause()
    prompts = [chr(ord("a") + i % 26) for i in range(2048)]
    call = asyncio.create_task(post(pair, prompt=prompts))
    await pair.engine.wait_for(lambda: len(pair.engine.submissions) == play._MAX_CONCURRENT)
    assert pair.app.admission.num_requests == 2048
    for _ in range(200):
        await asyncio.sleep(0)
    assert len(pair.engine.submissions) == play._MAX_CONCURRENT
    pair.engine.resume()
    status, answer = await call
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == prompts


async def test_one_invalid_prompt_ends_the_call_and_releases_all_permits(make_pair, post):
    pair = await make_pair(http=True)
    pair.engine.pause()
    status, answer = await post(pair, prompt=[[1]] * 100 + [[258]])
    assert status == 400
    assert "token id 258" in answer["error"]["message"]
    pair.engine.resume()
    await pair.idle()
