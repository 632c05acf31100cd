import asyncio

import pytest

from chairlift.service.end_reason import EndReason
from frontend.errors import EngineFault, EngineUnavailable
from frontend.routing.logprobs import LogprobBatch
from frontend.routing.stream import CancelReason, RequestEnd, RequestStream


class Engine:
    """Records credit and cancellations."""

    def __init__(self):
        self.grants = []
        self.cancels = []

    def attach(self, stream):
        return stream.attach(self.grants.append, self.cancels.append)


def make_stream(engine=None, *, window=8, max_tokens=1000, coalesce=True, on_first_token=None):
    stream = RequestStream(window=window, max_tokens=max_tokens, coalesce=coalesce, on_first_token=on_first_token)
    assert (engine or Engine()).attach(stream) == window
    return stream


def detach(stream):
    stream.detach(lambda _: None, was_taken=True)


def end(num_output_tokens):
    return RequestEnd(EndReason.END_TOKEN, 9, 1, 0, num_output_tokens)


async def test_everything_buffered_is_taken_at_once():
    stream = make_stream()
    stream.push(0, [1], None)
    stream.push(1, [2, 3], None)
    batch = await stream.take()
    assert (batch.first_index, batch.token_ids, batch.end) == (0, [1, 2, 3], None)
    stream.push(3, [4], None)
    stream.finish(end(4))
    batch = await stream.take()
    assert (batch.first_index, batch.token_ids, batch.end) == (3, [4], end(4))


async def test_without_coalescing_tokens_are_taken_one_by_one():
    engine = Engine()
    stream = make_stream(engine, window=4, coalesce=False)
    stream.push(0, [1, 2], LogprobBatch(1, [-0.1, -0.2], [5, 6], [-1.0, -2.0]))
    stream.push(2, [3], LogprobBatch(1, [-0.3], [7], [-3.0]))
    stream.finish(end(3))
    batches = [await stream.take() for _ in range(3)]
    assert [(batch.first_index, batch.token_ids, batch.end) for batch in batches] == [
        (0, [1], None),
        (1, [2], None),
        (2, [3], end(3)),
    ]
    assert [(batch.logprobs.chosen, batch.logprobs.top_ids) for batch in batches] == [
        ([-0.1], [5]),
        ([-0.2], [6]),
        ([-0.3], [7]),
    ]


async def test_without_coalescing_credit_comes_back_token_by_token():
    engine = Engine()
    stream = make_stream(engine, window=4, coalesce=False)
    stream.push(0, [1, 2, 3, 4], None)
    for _ in range(4):
        await stream.take()
    assert engine.grants == [2]


async def test_reader_waits_for_tokens():
    stream = make_stream()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert not reader.done()
    stream.push(0, [1], None)
    assert (await reader).token_ids == [1]


async def test_cancelled_reader_leaves_the_stream_usable():
    stream = make_stream()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    stream.push(0, [1], None)
    assert (await stream.take()).token_ids == [1]


async def test_known_tokens_are_dropped():
    stream = make_stream()
    stream.push(0, [1, 2], None)
    stream.push(0, [1, 2], None)
    stream.push(1, [2, 3], LogprobBatch(1, [-1.0, -2.0], [7, 8], [-3.0, -4.0]))
    batch = await stream.take()
    assert batch.token_ids == [1, 2, 3]
    assert batch.logprobs == LogprobBatch(1, [-2.0], [8], [-4.0])


def test_missing_tokens_are_a_fault():
    stream = make_stream()
    stream.push(0, [1], None)
    with pytest.raises(EngineFault, match="output token 2 when 1 was next"):
        stream.push(2, [3], None)


def test_end_with_another_token_count_is_a_fault():
    stream = make_stream()
    stream.push(0, [1], None)
    with pytest.raises(EngineFault, match="counts 2 output tokens, 1 arrived"):
        stream.finish(end(2))


async def test_next_engine_continues_where_the_lost_one_stopped():
    first, second = Engine(), Engine()
    stream = make_stream(first)
    stream.push(0, [5, 6, 7], None)
    detach(stream)
    assert list(stream.output_ids) == [5, 6, 7]
    assert second.attach(stream) == 5  # what is left of the window
    stream.push(3, [8], None)
    batch = await stream.take()
    assert (batch.first_index, batch.token_ids) == (0, [5, 6, 7, 8])
    stream.close(CancelReason.CLIENT)
    assert (first.cancels, second.cancels) == ([], [CancelReason.CLIENT])


async def test_credit_returned_between_two_engines_goes_to_the_next():
    engine = Engine()
    stream = make_stream(engine, window=4)
    stream.push(0, [1, 2, 3, 4], None)
    detach(stream)
    await stream.take()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert engine.attach(stream) == 4
    assert engine.grants == []
    reader.cancel()


def test_stream_without_credit_gets_one_token_because_0_means_unlimited():
    engine = Engine()
    stream = make_stream(engine, window=2)
    stream.push(0, [1, 2], None)
    detach(stream)
    assert engine.attach(stream) == 1


async def test_failure_precedes_buffered_tokens():
    stream = make_stream()
    stream.push(0, [1], None)
    stream.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await stream.take()


async def test_failure_wakes_the_reader():
    stream = make_stream()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineUnavailable("gone"))
    with pytest.raises(EngineUnavailable):
        await reader


async def test_credit_is_returned_by_half_windows_after_tokens_are_sent():
    engine = Engine()
    stream = make_stream(engine, window=8)
    stream.push(0, [1] * 8, None)
    await stream.take()
    assert engine.grants == []  # taken, not yet known to be written
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert engine.grants == [8]
    stream.push(8, [1] * 3, None)
    await reader
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert engine.grants == [8]  # 3 of 8: not worth a message
    stream.push(11, [1], None)
    await reader
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert engine.grants == [8, 4]
    reader.cancel()


async def test_no_credit_beyond_max_tokens():
    engine = Engine()
    stream = make_stream(engine, window=8, max_tokens=8)
    stream.push(0, [1] * 7, None)
    await stream.take()
    reader = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    assert engine.grants == []
    reader.cancel()


def test_close_cancels_once_and_drops_late_tokens():
    engine = Engine()
    stream = make_stream(engine)
    stream.close(CancelReason.STOP_TEXT)
    stream.close(CancelReason.CLIENT)
    stream.push(7, [1], None)
    stream.finish(end(99))
    stream.fail(EngineUnavailable("gone"))
    assert engine.cancels == [CancelReason.STOP_TEXT]


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_close_after_the_end_cancels_nothing(how):
    engine = Engine()
    stream = make_stream(engine)
    if how == "finish":
        stream.finish(end(0))
    else:
        stream.fail(EngineUnavailable("gone"))
    stream.close(CancelReason.CLIENT)
    assert engine.cancels == []


def test_first_token_is_reported_once():
    calls = []
    stream = make_stream(on_first_token=lambda: calls.append(1))
    stream.push(0, [1], None)
    stream.push(1, [1], None)
    assert calls == [1]
    assert stream.clock.first_token_at_s is not None
