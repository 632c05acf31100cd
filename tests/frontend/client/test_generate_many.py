"""Many prompts through both clients against a real frontend."""

import asyncio
import builtins

import grpc
import pytest

from chairlift import AsyncClient, GenerationError
from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.frontend.fake_engine import rejection


@pytest.fixture
def generate_many(client):
    return client.generate_many


async def test_answers_come_in_the_order_of_the_prompts(generate_many):
    prompts = [
        "x" * (1 + 37 * index % 50) + str(index) for index in range(100)
    ]  # the engine ends them in another order
    answers = await generate_many(prompts, {"max_tokens": 100}, max_in_flight=16)
    assert [answer.text for answer in answers] == prompts


async def test_no_prompts_no_answers(generate_many):
    assert list(await generate_many([])) == []


async def test_params_of_each_prompt(generate_many):
    answers = await generate_many(["abcdef"] * 3, [{"max_tokens": 1}, {"max_tokens": 2}, {"num_answers": 2}])
    assert [answer.text for answer in answers] == ["a", "ab", "abcdef"]
    assert [len(answer.other_answers) for answer in answers] == [0, 0, 1]


async def test_max_in_flight_limits_concurrent_prompts(generate_many, engine):
    engine.pause()
    task = asyncio.create_task(generate_many(["ab"] * 9, max_in_flight=4))
    await engine.wait_for(lambda: engine.num_open == 4)
    assert len(engine.submissions) == 4
    engine.resume()
    assert len(await task) == 9


async def test_refused_prompts_are_sent_again(generate_many, engine):
    def full():
        return rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "full", retry_after_s=0)

    engine.rejections = [full(), None, full(), full()]
    prompts = [f"prompt {index}" for index in range(8)]
    answers = await generate_many(prompts, max_in_flight=3)
    assert [answer.text for answer in answers] == prompts
    assert len(engine.submissions) == 11


async def test_first_error_ends_everything(generate_many, engine, pair):
    engine.pause()
    endless = {"ignore_end_token": True, "max_tokens": 4000}
    task = asyncio.create_task(generate_many(["ab", "cd", "ef"], [endless, {"temperature": -1.0}, endless]))
    with pytest.raises(GenerationError) as raised:
        await task
    assert raised.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert raised.value.__notes__ == ["prompt 1 of 3"]
    await pair.app.calls.wait_idle()  # the others were cancelled
    engine.resume()
    await engine.wait_for(lambda: engine.num_open == 0)


async def test_return_errors_puts_errors_in_the_place_of_answers(generate_many):
    outcomes = await generate_many(["ab", "x" * 9000, "cd"], return_errors=True)
    assert (outcomes[0].text, outcomes[2].text) == ("ab", "cd")
    assert outcomes[1].reason == "REQUEST_TOO_LONG"


async def test_deadline_is_each_prompts_own(generate_many, engine):
    engine.pause()
    outcomes = await generate_many(["ab", "cd"], timeout_s=0.3, return_errors=True)
    assert [outcome.status for outcome in outcomes] == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2
    engine.resume()


async def test_cancelled_batch_leaves_nothing_in_the_engine(target, engine):
    engine.pause()
    async with AsyncClient(target) as client:
        task = asyncio.create_task(client.generate_many(["ab"] * 20, max_in_flight=5))
        await engine.wait_for(lambda: engine.num_open == 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.wait_for(lambda: len(engine.cancels) == 5)
    engine.resume()
    await engine.wait_for(lambda: engine.num_open == 0)
    assert len(engine.submissions) == 5


async def test_progress_is_drawn_on_request(generate_many, capsys):
    await generate_many(["ab"] * 3, progress=True)
    drawn = capsys.readouterr().err
    assert "3/3" in drawn
    assert "output tokens/s" in drawn


async def test_progress_without_standard_error(generate_many, monkeypatch):
    monkeypatch.setattr("sys.stderr", None)  # of a process that was started with `2>&-`
    assert [answer.text for answer in await generate_many(["ab"])] == ["ab"]


async def test_progress_without_tqdm_is_silent_unless_asked_for(generate_many, monkeypatch, capsys):
    import_module = builtins.__import__

    def without_tqdm(name, *args, **kwargs):
        if name == "tqdm":
            raise ModuleNotFoundError("No module named 'tqdm'")
        return import_module(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert len(await generate_many(["ab"])) == 1
    assert capsys.readouterr().err == ""
    with pytest.raises(ModuleNotFoundError, match="pip install tqdm"):
        await generate_many(["ab"], progress=True)
