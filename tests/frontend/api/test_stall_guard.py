"""StallGuard in virtual time: a write that takes too long ends, and no other one does."""

import asyncio

import pytest

from frontend.api.stall_guard import StallGuard
from frontend.errors import ClientStalled
from tests.support.loadgen.virtual_time import VirtualLoop

TIMEOUT_S = 10.0


def in_virtual_time(main):
    """Runs a coroutine; returns its result and the seconds that passed."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        result = runner.run(main())
        return result, runner.get_loop().time()


def test_a_write_that_takes_too_long_is_a_stalled_client():
    async def main():
        guard = StallGuard(TIMEOUT_S)
        with pytest.raises(ClientStalled, match="has read nothing for 10 s"), guard:
            await asyncio.sleep(3600)
        task = asyncio.current_task()
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # it is not cancelled any more
        with guard:  # and may write again
            await asyncio.sleep(1)
        guard.close()

    assert in_virtual_time(main)[1] == TIMEOUT_S + 1


@pytest.mark.parametrize("pause_s", [0.0, 0.5, 30.0])
@pytest.mark.parametrize("write_s", [0.0, 0.1, 9.9])
def test_writes_that_are_in_time_go_on_for_ever(pause_s, write_s):
    async def main():
        guard = StallGuard(TIMEOUT_S)
        for _ in range(50):
            with guard:
                await asyncio.sleep(write_s)
            await asyncio.sleep(pause_s)
        with pytest.raises(ClientStalled), guard:
            await asyncio.sleep(3600)
        guard.close()

    assert in_virtual_time(main)[1] == pytest.approx(50 * (write_s + pause_s) + TIMEOUT_S)


def test_all_writes_share_a_timer_and_none_is_left():
    async def main():
        loop = asyncio.get_running_loop()
        num_timers = 0
        call_at = loop.call_at

        def counted(when, callback, *args, **kwargs):
            nonlocal num_timers
            num_timers += callback.__name__ == "_look"
            return call_at(when, callback, *args, **kwargs)

        loop.call_at = counted
        guard = StallGuard(TIMEOUT_S)
        for _ in range(100):
            with guard:
                await asyncio.sleep(1)
        guard.close()
        assert num_timers < 20
        assert not any(not handle.cancelled() for handle in loop._scheduled)
        guard.close()

    in_virtual_time(main)


def test_a_cancellation_stays_one_even_when_it_is_late_too():
    async def main():
        guard = StallGuard(TIMEOUT_S)

        async def write():
            with guard:
                await asyncio.sleep(3600)

        for cancel_at_s in (1.0, TIMEOUT_S):
            task = asyncio.create_task(write())
            asyncio.get_running_loop().call_later(cancel_at_s, task.cancel)
            with pytest.raises(asyncio.CancelledError):
                await task
        guard.close()

    in_virtual_time(main)


def test_an_error_of_the_write_is_not_replaced():
    async def main():
        guard = StallGuard(TIMEOUT_S)
        with pytest.raises(ConnectionError), guard:
            raise ConnectionError
        guard.close()

    in_virtual_time(main)


def test_tasks_of_one_stream_take_turns():
    async def main():
        guard, lock, stalled = StallGuard(TIMEOUT_S), asyncio.Lock(), []

        async def write(number, write_s):
            async with lock:
                try:
                    with guard:
                        await asyncio.sleep(write_s)
                except ClientStalled:
                    stalled.append(number)

        await asyncio.gather(write(0, 5), write(1, 6), write(2, 11), write(3, 9))
        guard.close()
        return stalled

    assert in_virtual_time(main) == ([2], 5 + 6 + TIMEOUT_S + 9)
