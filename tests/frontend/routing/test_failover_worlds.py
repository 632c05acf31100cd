"""Many requests with engines that die repeatedly: only a poison request fails, all other answers are complete."""

import asyncio
import logging
import random

import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing import quarantine
from tests.hang import HANG_S
from tests.support.frontend.accounts import check_account
from tests.support.frontend.fake_engine import FakeEngine, paused_engine

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it does so."


class Poisoned(FakeEngine):
    """An engine that dies as soon as it would compute the poison request."""

    deaths = 0
    death = None

    async def step(self):
        for session in self._sessions:
            for request in session.requests.values():
                if request.submission.request_id == "poison":
                    Poisoned.deaths += 1
                    self.death = asyncio.create_task(self.kill())
                    await asyncio.Event().wait()
        return await super().step()


async def test_poison_request_fails_alone(make_world, read, text_request, ids, monkeypatch):
    """Engines are restarted at once, as by a supervisor. The other requests lose no token, and none fails."""
    Poisoned.deaths = 0
    world = await make_world(2, make_engine=Poisoned)
    for engine in world.engines.values():
        engine.pause()  # until all requests have arrived: without an engine, new ones would be refused
    stop = asyncio.Event()

    async def supervise():
        while not stop.is_set():
            for index, engine in list(world.engines.items()):
                if engine.death is not None:
                    await engine.death  # completely, because the end of its server removes the socket
                    await world.start(index)
            await asyncio.sleep(0.01)

    supervision = asyncio.create_task(supervise())
    texts = [f"{number} {TEXT}" for number in range(20)]
    good = [read(world, text) for text in texts]
    request = text_request("poison")
    request.spec.request_id = "poison"
    poison = asyncio.create_task(_status(world.stub.StreamGenerate(request)))
    await world.until(lambda: sum(engine.num_open for engine in world.engines.values()) == 21)
    for engine in world.engines.values():
        engine.resume()
    for text, reading in zip(texts, good, strict=True):
        async with asyncio.timeout(HANG_S):
            await reading.task
        await reading.complete(ids(text))
    async with asyncio.timeout(HANG_S):
        status, details = await poison
    assert status is grpc.StatusCode.INTERNAL
    assert "times while it computed this request" in details
    assert 4 <= Poisoned.deaths <= 7  # depends on how many others were new or on trial with it
    stop.set()
    await supervision


async def _status(call):
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details()
    return None, ""


async def test_answer_that_makes_progress_may_lose_any_number_of_engines(make_world, read, ids):
    world = await make_world(2, make_engine=paused_engine, max_moves=1)
    text = TEXT * 2
    reading = read(world, text)
    for _ in range(4):
        index = await world.held()
        for _ in range(quarantine.CLEARED_TOKENS):
            await world.engines[index].step()
        num_tokens = (
            len(reading.token_ids) // quarantine.CLEARED_TOKENS * quarantine.CLEARED_TOKENS + quarantine.CLEARED_TOKENS
        )
        await world.until(lambda num_tokens=num_tokens: len(reading.token_ids) >= num_tokens)
        await world.kill(index)
        await world.start(index)
        await world.until_usable(2)
    for engine in world.engines.values():
        engine.resume()
    await reading.complete(ids(text))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
async def test_streams_are_complete_while_engines_die_at_random(make_world, text_request, ids, seed, caplog):
    """Engines die and are restarted at random: every stream is complete, cancelled or rejected."""
    caplog.set_level(logging.CRITICAL)
    rng = random.Random(seed)
    num_engines = rng.randrange(1, 4)

    def make_engine(**options):
        return FakeEngine(step_interval_s=rng.choice([0.0, 0.001]), tokens_per_step=rng.randrange(1, 4), **options)

    world = await make_world(
        num_engines, make_engine=make_engine, token_window=rng.choice([1, 3, 16, 256]), max_moves=100
    )
    outcomes = {"whole": 0, "cancelled": 0, "refused": 0}

    async def request():
        text = "".join(rng.choice("abcdefghij ") for _ in range(rng.randrange(1, 150)))
        expected = ids(text)
        stop_text = rng.random() < 0.3 and text[len(text) // 2 :][:3]
        options = {"stop_texts": [stop_text]} if stop_text else {}
        cancel_at = rng.random() < 0.2 and rng.randrange(len(text))
        call = world.stub.StreamGenerate(
            text_request(text, output=pb.OutputOptions(token_ids=True), max_tokens=3000, **options)
        )
        tokens, answer, ends = [], "", 0
        async for message in call:
            assert not ends
            if message.HasField("chunk"):
                assert message.chunk.first_token_index == len(tokens)
                tokens.extend(message.chunk.token_ids)
                answer += message.chunk.text
            if message.HasField("finished"):
                ends += 1
                check_account(message.finished)
                assert message.finished.usage.num_output_tokens == len(tokens)
            if cancel_at and len(tokens) > cancel_at:
                call.cancel()
                outcomes["cancelled"] += 1
                return
        assert ends == 1
        outcomes["whole"] += 1
        assert tokens == expected[: len(tokens)]
        assert answer == (text[: text.index(stop_text)] if stop_text else text)
        if not stop_text:
            assert tokens == expected

    async def insist():
        while not world.app.engines.serving:
            await asyncio.sleep(0.002)
        try:
            await request()
        except grpc.aio.AioRpcError as error:
            if "no engine is attached" not in error.details():  # possible for new requests
                raise
            outcomes["refused"] += 1

    waves = [asyncio.create_task(insist()) for _ in range(60)]
    for _ in range(12):
        await asyncio.sleep(rng.random() * 0.03)
        index = rng.choice(list(world.engines))
        await world.kill(index)
        waves += [asyncio.create_task(insist()) for _ in range(4)]
        await asyncio.sleep(rng.random() * 0.03)
        await world.start(index)
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*waves)
    assert sum(outcomes.values()) == len(waves)
    assert outcomes["whole"] > 0
