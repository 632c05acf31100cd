"""How long tokens wait for those of the next steps, on a clock that the test sets."""

import asyncio
from typing import Any

import pytest

from engine.serving.coalescing import CoalescePolicy, Hold


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is what the test says, so that no timer runs by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[asyncio.TimerHandle] = []
        super().__init__()

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        self._timers.append(super().call_later(delay, *args, **kwargs))
        return self._timers[-1]

    def delays_s(self) -> list[float]:
        """Returns the delays of the timers that are not cancelled."""
        return [timer.when() - self.now_s for timer in self._timers if not timer.cancelled()]


@pytest.mark.parametrize(
    ("num_rows", "waited_s", "step_s", "keeps"),
    [
        (8, 0.0, 0.005, True),
        (64, 0.019, 0.005, True),
        (64, 0.021, 0.005, False),  # the next step would come too late
        (64, 0.0, 0.026, False),  # long steps are not worth waiting for
        (1, 0.0, 0.003, True),  # few streams wait an eighth of 25 ms
        (1, 0.0, 0.004, False),
        (1, 0.0025, 0.0003, True),
        (1, 0.003, 0.0003, False),
        (7, 0.0, 0.003, True),
        (7, 0.0, 0.004, False),
    ],
)
def test_tokens_wait_if_the_next_step_is_soon_for_the_number_of_streams(
    num_rows: int, waited_s: float, step_s: float, keeps: bool
) -> None:
    clock = Clock()

    async def second_step(max_delay_s: float) -> bool:
        hold = Hold(CoalescePolicy(max_delay_s), lambda: None)
        hold.keeps(num_rows=num_rows, step_s=0.0)
        clock.now_s += waited_s
        result = hold.keeps(num_rows=num_rows, step_s=step_s)
        hold.end()
        return result

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        assert runner.run(second_step(0.025)) is keeps
        assert not runner.run(second_step(0.0)), "0 disables coalescing"


@pytest.mark.parametrize(
    ("slack_s", "step_s", "keeps"),
    [
        (0.03, 0.0014, True),
        (0.03, 0.0016, False),  # a twentieth of the time until a token is due
        (0.3, 0.014, True),
        (0.3, 0.016, False),
        (10.0, 0.024, True),
        (10.0, 0.026, False),
        (-0.01, 0.0, False),  # late already
    ],
)
def test_tokens_with_a_due_time_wait_for_a_small_part_of_it(slack_s: float, step_s: float, keeps: bool) -> None:
    async def first_step() -> bool:
        hold = Hold(CoalescePolicy(0.025), lambda: None)
        result = hold.keeps(num_rows=64, step_s=step_s, slack_s=slack_s)
        hold.end()
        return result

    with asyncio.Runner(loop_factory=Clock) as runner:
        assert runner.run(first_step()) is keeps


@pytest.mark.parametrize(("num_rows", "delay_s"), [(1, 0.003125), (7, 0.003125), (8, 0.025), (100, 0.025)])
def test_one_timer_releases_what_no_step_follows(num_rows: int, delay_s: float) -> None:
    clock = Clock()

    async def hold() -> None:
        hold = Hold(CoalescePolicy(0.025), lambda: None)
        assert hold.keeps(num_rows=num_rows, step_s=0.0003)
        assert hold.keeps(num_rows=num_rows, step_s=0.0003)
        assert clock.delays_s() == pytest.approx([delay_s])
        hold.end()
        assert clock.delays_s() == [], "what was sent is not sent again"
        assert hold.keeps(num_rows=num_rows, step_s=0.0003), "a new hold starts"
        assert clock.delays_s() == pytest.approx([delay_s])

    with asyncio.Runner(loop_factory=lambda: clock) as runner:
        runner.run(hold())


async def test_the_timer_sends() -> None:
    sent = asyncio.Event()
    assert Hold(CoalescePolicy(0.025), sent.set).keeps(num_rows=1, step_s=0.0)
    await asyncio.wait_for(sent.wait(), 30)
