"""What signals mean, in the orders and at the times in which they can come."""

import asyncio
import logging
import signal

import pytest

from chairlift.service.signals import StopSignals
from tests.hang import HANG_S

TERM, INT = signal.SIGTERM, signal.SIGINT


class Process:
    """Notes what becomes of it; its clock stands still until told."""

    def __init__(self, num_open: int | None = None) -> None:
        self.now_s = 100.0
        self.did: list[str] = []
        self.signals = StopSignals(
            count_open=None if num_open is None else lambda: num_open,
            clean_up=lambda: self.did.append("clean up"),
            clock=lambda: self.now_s,
            end=lambda status: self.did.append(f"end {status}"),  # type: ignore[arg-type,return-value]
        )

    def gets(self, number: int, now_s: float) -> None:
        self.now_s = now_s
        self.signals.handle(number)


@pytest.mark.parametrize("number", [TERM, INT])
def test_the_same_signal_within_a_second_is_the_same_one(number: int, caplog: pytest.LogCaptureFixture) -> None:
    process = Process()
    assert not process.signals.stop.is_set()
    for now_s in (100.0, 100.0, 100.4, 101.0):
        process.gets(number, now_s)
    assert process.signals.stop.is_set()
    assert (process.did, caplog.messages) == ([], [])
    process.gets(number, 101.01)
    assert process.did == ["clean up", f"end {128 + number}"]


def test_another_signal_is_a_second_one_at_any_time() -> None:
    process = Process()
    process.gets(TERM, 100.0)
    process.gets(INT, 100.0)
    assert process.did == ["clean up", "end 130"]


@pytest.mark.parametrize(
    ("num_open", "says"),
    [
        (None, "second signal: ending at once"),
        (0, "second signal: ending at once, 0 requests cut off"),
        (1, "second signal: ending at once, 1 request cut off"),
        (24, "second signal: ending at once, 24 requests cut off"),
    ],
)
def test_a_sudden_end_says_what_it_costs(num_open: int | None, says: str, caplog: pytest.LogCaptureFixture) -> None:
    process = Process(num_open)
    with caplog.at_level(logging.WARNING):
        process.gets(TERM, 100.0)
        assert caplog.messages == []
        process.gets(TERM, 105.0)
    assert caplog.messages == [says]


async def test_the_process_gets_its_signals_on_its_loop() -> None:
    process = Process()
    process.signals.watch()
    try:
        signal.raise_signal(TERM)
        await asyncio.wait_for(process.signals.stop.wait(), HANG_S)
    finally:
        for number in (TERM, INT):
            asyncio.get_running_loop().remove_signal_handler(number)
