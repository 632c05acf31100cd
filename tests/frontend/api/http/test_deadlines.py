"""Deadlines, time budgets and time accounts over HTTP."""

import asyncio

import aiohttp
import openai
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.frontend.fake_engine import FakeEngine


def endless(**extra):
    return {"model": "fake", "max_tokens": 4000, "extra_body": {"ignore_eos": True, **extra}}


@pytest.fixture
async def slow_pair(make_pair):
    return await make_pair(http=True, engine=FakeEngine(step_interval_s=0.01))


async def refused(pair, body, **headers):
    """Status and error object of the answer to a raw body."""
    url, headers = (
        f"http://127.0.0.1:{pair.app.http_port}/v1/completions",
        {"content-type": "application/json", **headers},
    )
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=headers) as response:
        return response.status, (await response.json())["error"]


@pytest.fixture
def outcomes(scrape):
    """outcomes(pair) -> number of requests by how they ended."""

    def count(pair):
        counts = scrape(pair.app.metrics, "chairlift:request_success_total", "finished_reason")
        return {reason: number for reason, number in counts.items() if number}

    return count


@pytest.mark.parametrize("where", ["header", "body", "both"])
async def test_expired_call_is_a_504_that_clients_do_not_retry(skip, slow_pair, connect, where, outcomes):
    client = connect(slow_pair, max_retries=2)
    timeouts = {"body": {"timeout": 10}, "header": {}, "both": {"timeout": 10}}[where]
    headers = {"header": {"x-request-timeout": "10"}, "body": {}, "both": {"x-request-timeout": "60"}}[where]
    call = asyncio.ensure_future(client.completions.create(prompt="abc", **endless(**timeouts), extra_headers=headers))
    await slow_pair.engine.wait_for(lambda: slow_pair.engine.num_open == 1)
    skip(10.0)
    with pytest.raises(openai.InternalServerError) as caught:
        await call
    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.body["type"] == "server_error"
    assert len(slow_pair.engine.submissions) == 1
    assert 0 < slow_pair.engine.submissions[0].remaining_ms <= 10_000
    await slow_pair.idle()
    assert outcomes(slow_pair) == {"deadline": 1}


async def test_call_that_expires_after_its_first_byte_ends_with_an_error_event(skip, slow_pair, connect, outcomes):
    client = connect(slow_pair)
    stream = await client.chat.completions.create(
        messages=[{"role": "user", "content": "abc"}], stream=True, **endless(timeout=10)
    )
    while not (await anext(stream)).choices[0].delta.content:
        pass
    skip(10.0)
    with pytest.raises(openai.APIError) as caught:
        _ = [event async for event in stream]
    assert caught.value.code == "deadline_exceeded"
    await slow_pair.idle()
    assert outcomes(slow_pair) == {"deadline": 1}


async def test_call_expires_while_its_engine_is_silent(skip, make_pair, connect, outcomes):
    pair = await make_pair(http=True)
    pair.engine.pause()
    client = connect(pair)
    call = asyncio.ensure_future(client.completions.create(prompt=["abc", "def"], **endless(timeout=10)))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 2)
    skip(10.0)
    with pytest.raises(openai.InternalServerError) as caught:
        await call
    assert caught.value.status_code == 504
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 2)
    assert {reason for _, reason in pair.engine.cancels} == {engine_pb.CANCEL_REASON_DEADLINE}
    pair.engine.resume()
    await pair.idle()
    assert outcomes(pair) == {"deadline": 2}


async def test_call_within_its_deadline_completes(shared_pair, shared_client):
    answer = await shared_client.completions.create(
        model="fake", prompt="abc", extra_body={"timeout": 600}, extra_headers={"x-request-timeout": "595"}
    )
    assert answer.choices[0].text == "abc"
    assert 0 < shared_pair.engine.submissions[0].remaining_ms <= 595_000


async def test_client_side_timeout_closes_the_connection_and_is_not_a_deadline(skip, make_pair, connect, outcomes):
    pair = await make_pair(http=True)
    pair.engine.pause()
    client = connect(pair)
    call = asyncio.ensure_future(client.completions.create(prompt="abc", **endless(), timeout=10))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    skip(10.0)
    with pytest.raises(openai.APITimeoutError):
        await call
    await pair.engine.wait_for(lambda: len(pair.engine.cancels) == 1)
    assert pair.engine.submissions[0].remaining_ms > 500_000  # --default-timeout's, not the client's
    assert pair.engine.cancels[0][1] == engine_pb.CANCEL_REASON_CLIENT
    pair.engine.resume()
    await pair.idle()
    assert outcomes(pair) == {"cancelled": 1}


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "86401", "5s", "", "1" * 400])
async def test_header_out_of_range_is_refused_by_name(shared_pair, value):
    status, error = await refused(shared_pair, '{"prompt": "abc"}', **{"x-request-timeout": value})
    assert status == 400
    assert error["param"] == "x-request-timeout"
    assert "it must be a number of seconds above 0 and at most 86400" in error["message"]
    assert len(error["message"]) < 200
    assert not shared_pair.engine.submissions


@pytest.mark.parametrize("name", ["timeout", "time_budget"])
@pytest.mark.parametrize("value", ["0", "-1", "1e300", "-1e300", "NaN", "Infinity", '"soon"', "[1]"])
async def test_parameter_out_of_range_is_refused_by_name(shared_pair, name, value):
    status, error = await refused(shared_pair, f'{{"prompt": "abc", "{name}": {value}}}')
    assert (status, error["param"]) == (400, name)
    assert name in error["message"]
    assert not shared_pair.engine.submissions


async def test_time_budget_of_a_day_is_not_cut_short_by_the_default_deadline(make_pair, connect):
    pair = await make_pair(http=True)
    await connect(pair).completions.create(model="fake", prompt="abc", extra_body={"time_budget": 86400})
    (submission,) = pair.engine.submissions
    assert not submission.HasField("remaining_ms")
    assert submission.stops.time_budget_ms > 86_000_000


async def test_time_budget_ends_an_answer_with_what_there_is(skip, slow_pair, connect, outcomes):
    engine = slow_pair.engine
    engine.pause()
    call = asyncio.ensure_future(connect(slow_pair).completions.create(prompt="abc", **endless(time_budget=10)))
    await engine.wait_for(lambda: engine.num_open == 1)
    for _ in range(3):
        await engine.step()
    skip(10.0)
    engine.resume()
    (choice,) = (await call).choices
    assert (choice.finish_reason, choice.text) == ("length", "abc")
    assert outcomes(slow_pair) == {"length": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_choices_tell_where_their_time_went(slow_pair, connect, stream):
    client = connect(slow_pair)
    call = client.completions.create(model="fake", prompt="abc", n=2, stream=stream)
    if stream:
        choices = [event.choices[0] async for event in await call]
        accounts = [choice.timing for choice in choices if choice.finish_reason]
    else:
        accounts = [choice.timing for choice in (await call).choices]
    assert len(accounts) == 2
    for account in accounts:
        parts = [account[f"{name}_us"] for name in ("queued", "tokenized", "prefill", "decode", "parked", "preempted")]
        assert sum(parts) + account["moved_us"] == account["total_us"]
        assert account["prefill_us"] == 2000
        assert 0 < account["first_token_us"] <= account["total_us"]
        assert account["num_preemptions"] == 0


async def test_deadline_covers_tokenizing(make_pair, connect, outcomes):
    pair = await make_pair(http=True)
    tokenizer = pair.app.engines.attachment().model.tokenizer
    never = asyncio.Event()

    async def stuck(text, **_):
        await never.wait()

    tokenizer.encode = stuck
    with pytest.raises(openai.InternalServerError) as caught:
        await connect(pair).completions.create(model="fake", prompt="abc", extra_body={"timeout": 0.05})
    assert caught.value.status_code == 504
    await pair.idle()
    assert outcomes(pair) == {"deadline": 1}
