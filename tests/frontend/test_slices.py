"""Long work in slices lets other tasks run."""

import asyncio
import itertools
import time

import pytest

from frontend import slices
from frontend.slices import at_once, in_slices


@pytest.fixture(autouse=True)
def every_step_is_a_slice(monkeypatch):
    monkeypatch.setattr(slices, "SLICE_S", 0.0)


def counting(steps, log, name):
    for number in range(steps):
        log.append((name, number))
        yield
    return name


async def test_other_tasks_run_between_two_slices():
    log = []
    work = asyncio.create_task(in_slices(counting(5, log, "work")))
    while not work.done():
        log.append("other")
        await asyncio.sleep(0)
    assert await work == "work"
    numbers = [log.index(("work", number)) for number in range(5)]
    assert all("other" in log[first:last] for first, last in itertools.pairwise(numbers))


async def test_two_long_works_share_one_slice_per_iteration():
    log = []
    works = [asyncio.create_task(in_slices(counting(4, log, name))) for name in "ab"]
    assert await asyncio.gather(*works) == ["a", "b"]
    assert log[:2] == [("a", 0), ("b", 0)]  # work that fits one slice does not wait
    assert log[2:] == [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]


async def test_error_ends_the_work_and_the_next_one_continues():
    def failing():
        yield
        yield
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await in_slices(failing())
    assert await in_slices(counting(3, [], "next")) == "next"


async def test_cancelled_work_stops_and_frees_its_slice():
    closed = []

    def endless():
        try:
            while True:
                yield
        finally:
            closed.append(time.monotonic())

    work = asyncio.create_task(in_slices(endless()))
    for _ in range(5):
        await asyncio.sleep(0)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert closed
    assert await in_slices(counting(3, [], "next")) == "next"


def test_small_work_is_done_at_once():
    assert at_once(counting(3, [], "done")) == "done"


def test_event_loops_do_not_share_slices():
    for _ in range(2):
        works = [counting(3, [], name) for name in "ab"]

        async def run(works=works):
            return await asyncio.gather(*map(in_slices, works))

        assert asyncio.run(run()) == ["a", "b"]
