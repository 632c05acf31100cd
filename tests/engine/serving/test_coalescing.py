"""How long tokens wait for those of the next steps, on a clock that the test sets."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.cache_events import BlocksRemoved
from engine.core.outputs import (
    PromptLogprobs,
    RequestCompletion,
    RequestOutput,
    SchedulerStats,
    TimeAccount,
    TokenLogprobs,
)
from engine.core.request import RequestId
from engine.errors import QueueFull
from engine.interfaces import (
    AdmissionReport,
    CacheReport,
    DrainReport,
    FencePassed,
    LoopSnapshot,
    Report,
    StepReport,
)
from engine.serving.coalescing import CoalescePolicy, ReportOutbox

HOUR_S = 3600.0
NO_TIME = TimeAccount(0.0, 0.0, 0.0, 0.0, 0.0, num_preemptions=0)


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose time is what the test says, so that no timer runs by itself."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__()

    def time(self) -> float:
        return self.now_s


class World:
    """An outbox, and the event loop's side of it.

    Attributes:
        num_calls: how often the event loop was woken.
    """

    def __init__(self, loop: Clock, max_delay_s: float = 0.025) -> None:
        self.clock = loop
        self.num_calls = 0
        self._calls: list[Callable[[], object]] = []
        self._delivered: list[Report] = []
        self.outbox = ReportOutbox(
            self._call, self._delivered.append, CoalescePolicy(max_delay_s), clock=lambda: loop.now_s
        )

    def _call(self, function: Callable[..., object], *args: object) -> None:
        self.num_calls += 1
        self._calls.append(lambda: function(*args))

    def delivered(self) -> list[Report]:
        """Runs the event loop as far as its clock says, and returns what came since."""
        self.clock.run_until_complete(self._run())
        delivered = self._delivered.copy()
        self._delivered.clear()
        return delivered

    async def _run(self) -> None:
        for _ in range(3):  # a timer's call comes a turn later
            calls = self._calls.copy()
            self._calls.clear()
            for call in calls:
                call()
            await asyncio.sleep(0)


@pytest.fixture
def loop() -> Iterator[Clock]:
    loop = Clock()
    yield loop
    loop.close()


@pytest.fixture
def world(loop: Clock) -> World:
    return World(loop)


def step(
    number: int = 1, *, num_rows: int = 8, step_s: float = 0.005, slack_s: float | None = None, **fields: Any
) -> StepReport:
    """A step with a token for each request; `fields` are of the first one's output."""
    stats = SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, min_slack_s=slack_s)
    snapshot = LoopSnapshot(number, number, stats, step_us=round(step_s * 1e6))
    outputs = [RequestOutput(RequestId(row), number, (5,)) for row in range(num_rows)]
    outputs[0] = outputs[0]._replace(**fields)
    return StepReport(tuple(outputs), snapshot, 1000 + number)


@pytest.mark.parametrize(
    ("num_rows", "waited_s", "step_s", "waits"),
    [
        (8, 0.0, 0.005, True),
        (64, 0.019, 0.005, True),
        (64, 0.021, 0.005, False),  # the next step would come too late
        (64, 0.0, 0.026, False),  # long steps are not worth waiting for
        (1, 0.0, 0.0049, True),  # few streams wait for short steps only
        (1, 0.0, 0.0051, False),
        (1, 0.0245, 0.0003, True),
        (1, 0.0248, 0.0003, False),
        (7, 0.02, 0.0049, True),
        (7, 0.0, 0.0051, False),
    ],
)
def test_tokens_wait_if_the_next_step_is_soon_for_the_number_of_streams(
    num_rows: int, waited_s: float, step_s: float, waits: bool, world: World
) -> None:
    reports = step(1, num_rows=num_rows, step_s=0.0), step(2, num_rows=num_rows, step_s=step_s)
    world.outbox.put(reports[0])
    world.clock.now_s += waited_s
    world.outbox.put(reports[1])
    assert world.delivered() == ([] if waits else list(reports))


def test_without_a_delay_every_report_goes_at_once(loop: Clock) -> None:
    world = World(loop, max_delay_s=0.0)
    world.outbox.put(step(step_s=0.0))
    assert len(world.delivered()) == 1


@pytest.mark.parametrize(
    ("slack_s", "step_s", "waits"),
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
def test_tokens_with_a_due_time_wait_for_a_small_part_of_it(
    slack_s: float, step_s: float, waits: bool, world: World
) -> None:
    world.outbox.put(step(num_rows=64, step_s=step_s, slack_s=slack_s))
    assert bool(world.delivered()) is not waits


@pytest.mark.parametrize("num_rows", [1, 8, 100])
def test_tokens_that_no_step_follows_go_after_the_delay(num_rows: int, world: World) -> None:
    for number in range(3):
        world.outbox.put(step(number, num_rows=num_rows, step_s=0.0003))
    assert world.num_calls == 1, "the event loop is woken for the first one only"
    assert world.delivered() == []
    world.clock.now_s = 0.0249
    assert world.delivered() == []
    world.clock.now_s = 0.0251
    assert len(world.delivered()) == 3


def test_after_the_delay_the_next_step_goes_at_once_and_then_tokens_wait_again(world: World) -> None:
    world.outbox.put(step(1))
    assert world.delivered() == []
    world.clock.now_s += 0.03
    assert len(world.delivered()) == 1
    world.outbox.put(step(2))
    assert len(world.delivered()) == 1
    world.outbox.put(step(3))
    assert world.delivered() == []
    world.clock.now_s += 0.024
    assert world.delivered() == [], "the first timer has gone"
    world.clock.now_s += 0.002
    assert len(world.delivered()) == 1


def test_a_report_with_a_longer_delay_does_not_stay_after_the_timer_of_a_shorter_one(world: World) -> None:
    world.outbox.put(step(1, num_rows=64, step_s=0.001, slack_s=0.1))
    assert world.delivered() == []
    world.clock.now_s = 0.006
    assert len(world.delivered()) == 1
    world.outbox.put(step(2, num_rows=64, step_s=0.001, slack_s=10.0))
    world.clock.now_s = 0.032
    assert len(world.delivered()) == 1


def test_a_report_with_a_shorter_delay_takes_those_before_it_along(world: World) -> None:
    world.outbox.put(step(1, num_rows=64, step_s=0.001, slack_s=10.0))
    world.outbox.put(step(2, num_rows=64, step_s=0.001, slack_s=0.1))
    assert world.delivered() == []
    world.clock.now_s = 0.0051
    assert len(world.delivered()) == 2
    world.clock.now_s = 0.006
    world.outbox.put(step(3, num_rows=64, step_s=0.001, slack_s=10.0))
    assert len(world.delivered()) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"num_cached_tokens": 0, "time": NO_TIME},
        {"completion": RequestCompletion(EndReason.MAX_TOKENS, 1, 0, 1, NO_TIME)},
        {"completion": RequestCompletion(EndReason.ENGINE_ERROR, 1, 0, 1, NO_TIME)},
        {"prompt_logprobs": PromptLogprobs(1, (TokenLogprobs(-4.0, (), ()),))},
        {"time": NO_TIME},  # of a request that has used its last credit, or comes back
    ],
)
def test_first_tokens_completions_and_the_last_token_of_a_credit_go_at_once_with_what_waits(
    fields: dict[str, object], loop: Clock
) -> None:
    world = World(loop, HOUR_S)
    reports = step(1, num_rows=20), step(2, num_rows=20, **fields)
    world.outbox.put(reports[0])
    assert world.delivered() == []
    world.outbox.put(reports[1])
    assert world.delivered() == list(reports)
    world.outbox.put(step(3))
    assert world.delivered() == []


@pytest.mark.parametrize(
    "report", [AdmissionReport((), ((RequestId(1), QueueFull("full")),)), DrainReport(1.0), FencePassed(1)]
)
def test_other_reports_go_at_once_after_what_waits(report: Report, loop: Clock) -> None:
    world = World(loop, HOUR_S)
    tokens = step()
    world.outbox.put(tokens)
    world.outbox.put(report)
    assert world.delivered() == [tokens, report]


def test_changes_of_the_cache_wait_with_the_tokens_of_their_step(world: World) -> None:
    changes = CacheReport((BlocksRemoved((b"hash",)),))
    for number in range(3):
        world.outbox.put(step(number))
        world.outbox.put(changes)
    assert world.delivered() == []
    world.clock.now_s = 0.026
    assert len(world.delivered()) == 6


@pytest.mark.parametrize("report", [CacheReport((BlocksRemoved((b"hash",)),)), AdmissionReport((RequestId(1),), ())])
def test_what_nobody_waits_for_goes_with_the_first_token_or_a_little_later(report: Report, world: World) -> None:
    world.outbox.put(report)
    assert world.delivered() == []
    first = step(time=NO_TIME)
    world.outbox.put(first)
    assert world.delivered() == [report, first]
    world.outbox.put(report)
    assert world.delivered() == []
    world.clock.now_s += 0.026
    assert world.delivered() == [report]


def test_flush_sends_what_waits(loop: Clock) -> None:
    world = World(loop, HOUR_S)
    world.outbox.put(step())
    world.outbox.flush()
    assert len(world.delivered()) == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_two_threads_lose_and_reorder_nothing(delay_s: float) -> None:
    """The event loop's timers and the step loop's flushes meet at any moment."""
    num_reports, numbers, is_complete = 2000, [], threading.Event()
    ready: list[asyncio.AbstractEventLoop] = []
    has_started = threading.Event()

    def deliver(report: Report) -> None:
        assert isinstance(report, StepReport)
        numbers.append(report.snapshot.engine_step)
        if len(numbers) == num_reports:
            is_complete.set()
            ready[0].stop()

    def serve() -> None:
        loop = asyncio.new_event_loop()
        ready.append(loop)
        loop.call_soon(has_started.set)
        loop.run_forever()
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    has_started.wait()
    outbox = ReportOutbox(ready[0].call_soon_threadsafe, deliver, CoalescePolicy(delay_s))
    for number in range(num_reports):
        outbox.put(step(number, step_s=0.0))
    assert is_complete.wait(30), f"{len(numbers)} of {num_reports} reports came"
    thread.join()
    assert numbers == list(range(num_reports))
