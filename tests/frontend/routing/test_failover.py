"""Failover: an engine dies at some moment of a request, and the client gets one stream with every token once."""

import asyncio
import logging

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.generation.deadline import Deadline
from tests.hang import HANG_S
from tests.support.frontend.accounts import check_account
from tests.support.frontend.fake_engine import FakeEngine, paused_engine, rejection
from tests.support.frontend.fake_requests import prompt_logprob

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so."


async def advance(world, index, reading, num_steps):
    """Makes steps; each waits until the client has the token of the previous one."""
    for _ in range(num_steps):
        num_tokens = len(reading.token_ids)
        await world.engines[index].step()
        await world.until(lambda num_tokens=num_tokens: len(reading.token_ids) > num_tokens)


@pytest.mark.parametrize("num_steps", [0, 1, 30, -2, -1])
async def test_stream_continues_on_another_engine_after_any_token(make_world, read, ids, num_steps, caplog, scrape):
    world = await make_world(2, make_engine=paused_engine)
    num_steps %= len(ids(TEXT))
    reading = read(world, TEXT, output={"top_logprobs": 1})
    index = await world.held()
    await advance(world, index, reading, num_steps)
    await world.kill(index)
    (other,) = world.engines.values()
    await other.wait_for(lambda: other.num_open == 1)
    (moved,) = other.submissions
    assert (moved.epoch, moved.start_index, len(moved.output_ids)) == (1, num_steps, 4 * num_steps)
    other.resume()
    finished = await reading.complete(ids(TEXT))
    assert (reading.text, reading.logprobs) == (TEXT, [-0.5] * (len(TEXT) + 1))
    assert finished.reason == pb.FINISH_REASON_END_TOKEN
    assert finished.timing.moved.ToMicroseconds() > 0
    lost = [record.message for record in caplog.records if "lost 1 open" in record.message]
    assert len(lost) == 1
    assert "1 moved to another engine" in lost[0]
    assert scrape(world.app.metrics, "chairlift:requests_lost_engine_total", "engine") == {"0": 1, "1": 0}
    assert scrape(world.app.metrics, "chairlift:request_moved_time_seconds_count") == 1
    ended = scrape(world.app.metrics, "chairlift:request_success_total", "engine", "finished_reason")
    assert {key for key, value in ended.items() if value} == {("0", "stop")}  # where it began


async def test_requests_of_an_engine_whose_step_fails_continue_elsewhere(make_world, read, ids):
    """Like `engine/serving/server.py`, it reports FAILED, ends every request with ENGINE_ERROR, and exits."""
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT)
    index = await world.held()
    await advance(world, index, reading, 3)
    engine = world.engines[index]

    def all_failed(step):
        for column in (step.handles, step.epochs, step.start_indices, step.token_counts, step.token_ids):
            del column[:]
        handle = engine.submissions[0].handle
        reason = engine_pb.COMPLETION_REASON_ENGINE_ERROR
        step.completions.add(handle=handle, reason=reason, num_output_tokens=3, detail="step failed")
        return [step]

    engine.rewrite_step = all_failed
    engine.set_state(engine_pb.ENGINE_STATE_FAILED)
    await engine.step()
    world.engines[1 - index].resume()
    await reading.complete(ids(TEXT))
    await world.kill(index)


async def test_engine_whose_step_loop_hangs_is_not_used_until_it_advances(make_world, read, ids, caplog):
    caplog.set_level(logging.INFO)
    world = await make_world(
        2, make_engine=lambda **options: paused_engine(heartbeat_s=0.02, **options), step_timeout_s=0.3
    )
    reading = read(world, TEXT)
    index = await world.held()
    await advance(world, index, reading, 3)
    hung, other = world.engines[index], world.engines[1 - index]
    hung.freeze()
    await world.until_usable(1)
    other.resume()
    await reading.complete(ids(TEXT))
    num_hellos = len(hung.hellos)
    await world.until(lambda: len(hung.hellos) > num_hellos + 1)  # it accepts connections, but is not used
    assert hung.instance_id not in world.attached()
    said = [record.message for record in caplog.records if "stuck for 0.3 s" in record.message]
    assert len(said) == 1
    hung.thaw()
    await world.until_usable(2)


async def test_stalled_engine_is_left_only_when_another_one_serves(make_world, read, ids, caplog):
    world = await make_world(2, absent=1, make_engine=lambda **options: paused_engine(heartbeat_s=0.02, **options))
    reading = read(world, TEXT)
    stalled = world.engines[0]
    await world.held()
    await advance(world, 0, reading, 3)
    stalled.freeze()
    stalled.is_stalled = True
    num_messages = next(iter(world.app.engines._connections.values()))._num_messages
    await world.until(
        lambda: next(iter(world.app.engines._connections.values()))._num_messages > num_messages + 3
    )  # there is no better engine
    assert "lost the engine" not in caplog.text
    other = await world.start(1)
    await world.until(lambda: stalled.instance_id not in world.attached())
    other.resume()
    await reading.complete(ids(TEXT))
    assert "its step makes no progress" in caplog.text
    stalled.is_stalled = False
    stalled.thaw()
    await world.until_usable(2)


async def test_engine_lost_while_the_prompt_is_tokenized(make_world, read, ids, monkeypatch):
    world = await make_world(1)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*args, **options):
        entered.set()
        await go_on.wait()
        return ids("abc")[:3]

    monkeypatch.setattr("frontend.generation.generation.tokenize", slow)
    reading = read(world, "abc")
    await entered.wait()
    await world.kill(0)
    go_on.set()
    await world.until(lambda: world.app.engines.num_waiting == 1)
    await world.start(0)
    await reading.complete(ids("abc"))


async def test_requests_wait_for_the_only_engine_and_continue(skip, make_world, read, ids, scrape):
    world = await make_world(1, make_engine=paused_engine)
    readings = [read(world, TEXT + str(number)) for number in range(3)]
    await world.engines[0].wait_for(lambda: world.engines[0].num_open == 3)
    for _ in range(5):
        await world.engines[0].step()
    await world.until(lambda: all(len(reading.token_ids) == 5 for reading in readings))
    await world.kill(0)
    assert world.app.engines.num_waiting == 3
    assert scrape(world.app.metrics, "chairlift:requests_without_engine") == 3
    assert not world.app._health.serving
    skip(0.05)
    refused = await read(world, "new").end()
    assert refused.error.code() is grpc.StatusCode.UNAVAILABLE  # new requests do not wait for an engine
    engine = await world.start(0)
    await engine.wait_for(lambda: engine.num_open == 3)
    new = read(world, "new")
    await engine.wait_for(lambda: engine.num_open == 4)
    assert [submission.epoch for submission in engine.submissions] == [1, 1, 1, 0]  # waiting requests go first
    assert scrape(world.app.metrics, "chairlift:requests_without_engine") == 0
    engine.resume()
    for number, reading in enumerate(readings):
        finished = await reading.complete(ids(TEXT + str(number)))
        assert finished.timing.moved.ToMicroseconds() >= 50_000
    await new.complete(ids("new"))


async def test_text_held_back_for_stop_texts_survives_failover(make_world, read):
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT, stop_texts=["brown bear", "over the"])
    index = await world.held()
    for _ in range(len("The quick brown ")):
        await world.engines[index].step()
    await world.until(lambda: len(reading.token_ids) == len("The quick brown "))
    assert reading.text == "The quick "  # the rest may become a stop text
    await world.kill(index)
    world.engines[1 - index].resume()
    await reading.end()
    assert reading.text == "The quick brown fox jumps "
    (finished,) = reading.finished
    assert (finished.reason, finished.stop_text) == (pb.FINISH_REASON_STOP_TEXT, "over the")


@pytest.mark.parametrize(("min_tokens", "end"), [(14, "brow"), (15, "brown fox jumps over the lazy dog, a")])
async def test_min_tokens_hold_stop_texts_back_after_failover(make_world, read, min_tokens, end):
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT, stop_texts=["n", "quick"], min_tokens=min_tokens)
    index = await world.held()
    await advance(world, index, reading, len("The quick br"))
    await world.kill(index)
    world.engines[1 - index].resume()
    await reading.end()
    (finished,) = reading.finished
    assert (reading.text, finished.stop_text) == (f"The quick {end}", "n")


async def test_stream_paused_by_backpressure_loses_nothing(skip, make_world, text_request, ids):
    """The answer is buffered up to its window; it is read after the engine was lost."""
    world = await make_world(2, token_window=8)
    request = text_request(TEXT)
    async with world.app._generations.open(request.spec, Deadline.at(None)) as answer:
        messages = answer.messages()
        assert (await anext(messages)).HasField("started")
        index = await world.held()
        (request,) = world.app.engines._usable[index][1].session._open.values()
        await world.until(lambda: request.stream.clock.is_paused)
        skip(0.05)  # only the lost engine could have accounted for this time
        await world.kill(index)
        text, finished = "", []
        async for message in messages:
            text += message.chunk.text
            finished += [message.finished] if message.HasField("finished") else []
    assert text == TEXT
    assert len(finished) == 1
    check_account(finished[0])
    assert finished[0].timing.parked.ToMicroseconds() >= 45_000


async def test_cancelled_request_is_not_moved(make_world, read):
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT)
    index = await world.held()
    reading.call.cancel()
    await asyncio.gather(reading.task, return_exceptions=True)
    await world.engines[index].wait_for(lambda: world.engines[index].cancels)
    await world.kill(index)
    (other,) = world.engines.values()
    assert other.submissions == []


async def test_request_cancelled_in_the_failover_queue_is_dropped(make_world, read):
    world = await make_world(1, make_engine=paused_engine)
    reading = read(world, TEXT)
    await world.held()
    await world.kill(0)
    assert world.app.engines.num_waiting == 1
    reading.call.cancel()
    await world.until(lambda: world.app.engines.num_waiting == 0)
    engine = await world.start(0)
    await world.until_usable(1)
    assert engine.submissions == []


async def test_engine_that_dies_before_it_sends_the_completion(make_world, read, ids):
    """The last token has arrived but not its Completion: the next engine only ends the request."""
    world = await make_world(2, make_engine=paused_engine)

    def without_end(step):
        del step.completions[:]
        return [step]

    for engine in world.engines.values():
        engine.rewrite_step = without_end
    reading = read(world, TEXT)
    index = await world.held()
    await advance(world, index, reading, len(ids(TEXT)))
    (other,) = [engine for number, engine in world.engines.items() if number != index]
    other.rewrite_step = lambda step: [step]
    other.resume()
    await world.kill(index)
    finished = await reading.complete(ids(TEXT))
    assert finished.reason == pb.FINISH_REASON_END_TOKEN


async def test_prompt_log_probabilities_are_complete_and_requested_only_until_then(make_world, read, ids):
    world = await make_world(2, make_engine=paused_engine)

    def first_part_only(step):
        del step.prompt_logprobs[1:]
        for column in (step.handles, step.epochs, step.start_indices, step.token_counts, step.token_ids):
            del column[:]
        del step.first_tokens[:]
        return [step]

    reading = read(world, TEXT, output={"echo": True, "prompt_logprobs": 0})
    index = await world.held()
    world.engines[index].rewrite_step = first_part_only  # dies in the middle of its prefill
    await world.engines[index].step()
    (request,) = world.app.engines._usable[index][1].session._open.values()
    await world.until(lambda: request.stream.prompt_logprobs.num_missing < len(ids(TEXT)) - 1)
    await world.kill(index)
    (other,) = world.engines.values()
    await other.wait_for(lambda: other.num_open == 1)
    assert other.submissions[0].HasField("prompt_logprobs")
    await other.step()
    await world.until(lambda: reading.started)
    await world.start(index)
    await world.until_usable(2)
    await world.kill(1 - index)
    (third,) = world.engines.values()
    await third.wait_for(lambda: third.num_open == 1)
    assert not third.submissions[0].HasField("prompt_logprobs")
    third.resume()
    await reading.complete(ids(TEXT))
    assert list(reading.started[0].prompt.logprobs.chosen) == [prompt_logprob(n) for n in range(1, len(TEXT))]
    assert reading.started[0].prompt.text == TEXT


async def test_request_without_an_engine_in_time_is_unavailable_with_a_retry_delay(make_world, read):
    world = await make_world(1, make_engine=paused_engine, failover_timeout_s=0.1)
    reading = read(world, TEXT)
    await world.held()
    await world.kill(0)
    assert (await reading.end()).error.code() is grpc.StatusCode.UNAVAILABLE
    assert "went away" in reading.error.details()
    assert any(key == "grpc-retry-pushback-ms" for key, _ in reading.error.trailing_metadata())


async def test_engine_that_rejected_a_request_is_tried_again(make_world, read, ids):
    world = await make_world(2, make_engine=paused_engine)
    reading = read(world, TEXT)
    index = await world.held()
    (other,) = [engine for number, engine in world.engines.items() if number != index]
    other.rejections = [rejection(engine_pb.REJECTION_REASON_QUEUE_FULL, "full")]
    other.resume()
    await world.kill(index)
    await reading.complete(ids(TEXT))
    assert [submission.epoch for submission in other.submissions] == [
        1,
        1,
    ]  # the same epoch, because no engine took it in between


async def test_several_answers_continue_independently(make_world, text_request, ids):
    world = await make_world(2, make_engine=lambda **options: FakeEngine(step_interval_s=0.002, **options))
    request = text_request(TEXT, output=pb.OutputOptions(token_ids=True), max_tokens=3000)
    request.spec.num_answers = 4
    tokens, finished, killed = {index: [] for index in range(4)}, [], False
    async for message in world.stub.StreamGenerate(request):
        if message.HasField("chunk"):
            answer = tokens[message.chunk.answer_index]
            assert message.chunk.first_token_index == len(answer)
            answer += message.chunk.token_ids
            if not killed and len(tokens[3]) > 20:
                killed = True
                await world.kill(max(world.engines, key=lambda index: world.engines[index].num_open))
        if message.HasField("finished"):
            finished.append(message.finished.answer_index)
    assert killed
    assert all(answer == ids(TEXT) for answer in tokens.values())
    assert sorted(finished) == [0, 1, 2, 3]


@pytest.mark.parametrize("engine_comes", [True, False])
async def test_draining_frontend_keeps_waiting_requests_for_its_grace_period(make_world, read, ids, engine_comes):
    world = await make_world(1, make_engine=paused_engine)
    reading = read(world, TEXT)
    engine = world.engines[0]
    await engine.wait_for(lambda: engine.num_open == 1)
    await world.kill(0)
    assert world.app.engines.num_waiting == 1
    drain = asyncio.create_task(world.app.drain(HANG_S if engine_comes else 0.2))
    await world.until(lambda: not world.app._health.serving)
    if engine_comes:
        (await world.start(0)).resume()
        await reading.complete(ids(TEXT))
    else:
        assert (await reading.end()).error.code() is grpc.StatusCode.UNAVAILABLE
        assert "this server has stopped" in reading.error.details()
    assert await drain == int(engine_comes)
    assert world.app.engines.num_waiting == 0


async def test_loss_and_end_of_the_wait_are_logged_once_for_all_requests(make_world, read, ids, caplog):
    num_requests = 3
    caplog.set_level(logging.INFO)
    world = await make_world(1, make_engine=paused_engine)
    address = world.engines[0].address
    readings = [read(world, TEXT) for _ in range(num_requests)]
    await world.engines[0].wait_for(lambda: world.engines[0].num_open == num_requests)
    await world.kill(0)
    (await world.start(0)).resume()
    for reading in readings:
        await reading.complete(ids(TEXT))
    assert len([message for message in caplog.messages if message.startswith(f"lost the engine at {address}: ")]) == 1
    logged = [record.args for record in caplog.records if record.name == "frontend.routing.router"]
    # First lost, moved, waiting and failed requests, then those that left the queue and those that still wait.
    assert logged == [(address, num_requests, 0, num_requests, 0), (num_requests, 0)]
