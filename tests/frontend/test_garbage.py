"""Full collections wait until no call is open, but not for ever."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from frontend.garbage import collect_when_idle
from tests.hang import HANG_S


@pytest.fixture(autouse=True)
def python_collects_again() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


class Cycle:
    """Garbage that only a full collection finds: it has survived those of young objects."""

    def __init__(self) -> None:
        self.itself = self

    @classmethod
    def left_behind(cls) -> "weakref.ref[Cycle]":
        cycle = cls()
        for generation in (0, 1):
            gc.collect(generation)
        return weakref.ref(cycle)


async def collected(garbage: "weakref.ref[Cycle]") -> None:
    async with asyncio.timeout(HANG_S):
        while garbage() is not None:
            await asyncio.sleep(0)


class Calls:
    """Counts how often it was asked."""

    def __init__(self, number: int) -> None:
        self.number, self.num_asked = number, 0

    @property
    def num_active(self) -> int:
        self.num_asked += 1
        return self.number


async def test_a_full_collection_waits_until_no_call_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.garbage._INTERVAL_S", 0.001)
    collect_when_idle(calls := Calls(1))
    garbage, kept = Cycle.left_behind(), list[Cycle]()
    while calls.num_asked < 5 or len(kept) < 200_000:
        kept += [Cycle() for _ in range(10_000)]  # Python would start full collections
        await asyncio.sleep(0)
    assert garbage() is not None
    calls.number = 0
    await collected(garbage)


async def test_calls_that_never_end_do_not_prevent_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frontend.garbage._INTERVAL_S", 0.001)
    monkeypatch.setattr("frontend.garbage._LONGEST_S", 0.01)
    collect_when_idle(Calls(1))
    await collected(Cycle.left_behind())


async def test_what_exists_at_the_start_is_never_walked() -> None:
    before = Cycle.left_behind()
    collect_when_idle(Calls(0))
    gc.collect()
    assert before() is not None
