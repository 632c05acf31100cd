"""Tasks that wake together resume over several iterations of the event loop, in order."""

import asyncio

from frontend.generation.turn_limiter import TurnLimiter
from tests.hang import HANG_S


async def test_max_per_turn_tasks_pass_and_the_others_follow_in_order():
    turn_limiter, passed, turns = TurnLimiter(3), [], []

    async def one(number):
        await turn_limiter.wait_turn()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(8)]
    while not all(task.done() for task in tasks):
        before = len(passed)
        await asyncio.sleep(0)
        turns.append(len(passed) - before)
    assert passed == list(range(8))
    assert max(turns) == 3


async def test_few_do_not_wait():
    turn_limiter = TurnLimiter(3)
    for _ in range(2):
        for _ in range(3):
            turn = turn_limiter.wait_turn()
            try:
                turn.send(None)
            except StopIteration:
                continue
            raise AssertionError("it waits")
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_cancelled_task_takes_no_turn():
    turn_limiter, passed = TurnLimiter(1), []

    async def one(number):
        await turn_limiter.wait_turn()
        passed.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG_S)
    assert passed == [0, 2, 3]
