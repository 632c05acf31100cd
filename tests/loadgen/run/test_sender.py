import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from loadgen.record import ABSENT, CHUNK, Status, new_requests
from loadgen.run.pacing import Pacer
from loadgen.run.preparer import Preparer
from loadgen.run.recorder import Recorder
from loadgen.run.sender import Sender, Shard
from loadgen.run.shared_arrays import PROGRESS
from loadgen.target.base import (
    PlannedRequest,
    RequestFailedError,
    RequestRefusedError,
    RequestTimedOutError,
    Sink,
    TargetFacts,
)
from tests.hang import HANG_S

Answer = Callable[[int, Sink], Awaitable[None]]


class FakeTarget:
    """Answers by a function; knows what is in flight."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.sent: list[int] = []
        self.tickets: list[str] = []
        self.cancelled: list[int] = []
        self.num_open = self.max_open = 0

    async def send(self, prepared: int, sink: Sink, retry_ticket: str = "") -> None:
        self.sent.append(prepared)
        self.tickets.append(retry_ticket)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        sink.sent()
        try:
            await self._answer(prepared, sink)
        except asyncio.CancelledError:
            self.cancelled.append(prepared)
            raise
        finally:
            self.num_open -= 1

    async def probe(self) -> TargetFacts:
        return TargetFacts("fake")

    async def count_tokens(self, text: str) -> int:
        return 0

    def prepare(self, request: PlannedRequest) -> int:
        return request.index

    async def close(self) -> None:
        pass


class Stage:
    """A sender with a fake target, and its notes."""

    def __init__(
        self,
        answer: Answer,
        due_s: Sequence[float],
        *,
        pacer: Pacer | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
        cancel_after: Sequence[int] | None = None,
        budget: int = 1 << 30,
        make: Callable[[int], int] = lambda index: index,
        **shard: Any,
    ) -> None:
        count = len(due_s)
        due_ns = [round(1e9 * due) for due in due_s]
        self.target = FakeTarget(answer)
        self.requests = new_requests(count)
        if shard.get("concurrency") is None:
            self.requests["scheduled_ns"] = due_ns
        self.errors: list[str] = []
        chunks, progress = np.zeros(100 * count, dtype=CHUNK), np.zeros(1, dtype=PROGRESS)
        recorder = Recorder(self.requests, chunks, progress, self.errors.append, clock)
        self.shard = Shard(range(count), due_ns, cancel_after or [0] * count, **shard)
        preparer = Preparer(self.shard.order, make, [1] * count, budget)
        preparer.fill()
        self.sender = Sender(self.target, preparer, recorder, self.shard, pacer or Pacer())

    async def run(self, start_ns: int | None = None) -> "np.ndarray[Any, Any]":
        await self.sender.run(time.monotonic_ns() if start_ns is None else start_ns)
        assert self.target.num_open == 0
        return self.requests

    def statuses(self) -> list[Status]:
        return [Status(status) for status in self.requests["status"]]


async def at_once(prepared: int, sink: Sink) -> None:
    sink.tokens(1)


def after(seconds: float) -> Answer:
    async def answer(prepared: int, sink: Sink) -> None:
        await asyncio.sleep(seconds)
        sink.tokens(1)

    return answer


async def never(prepared: int, sink: Sink) -> None:
    await asyncio.Event().wait()


async def test_ten_thousand_arrivals_are_sent_on_time_and_do_not_drift() -> None:
    class FakeTime:
        now_ns = 0

    async def sleep(delay_s: float) -> None:
        FakeTime.now_ns += round(delay_s * 1e9) + (rng.randint(0, 1_000_000) if delay_s else 7_000)
        await asyncio.sleep(0)

    async def slow_to_send(prepared: int, sink: Sink) -> None:
        FakeTime.now_ns += 200_000  # what sending costs the event loop
        sink.tokens(1)

    rng = random.Random(2)
    due_s = np.cumsum([rng.expovariate(500) for _ in range(10_000)]).tolist()
    stage = Stage(slow_to_send, due_s, pacer=Pacer(lambda: FakeTime.now_ns, sleep), clock=lambda: FakeTime.now_ns)
    requests = await stage.run(start_ns=5_000_000)
    lag_ns = requests["sent_ns"] - requests["scheduled_ns"]
    assert lag_ns.min() >= 0
    assert np.median(lag_ns) < 10_000
    assert abs(lag_ns[-1000:].mean() - lag_ns[:1000].mean()) < 100_000
    assert lag_ns[-1] < 1_000_000


async def test_a_slow_server_does_not_slow_its_own_load_down() -> None:
    all_here = asyncio.Event()

    async def answer(prepared: int, sink: Sink) -> None:
        if prepared == 49:
            all_here.set()
        await all_here.wait()
        sink.tokens(1)

    stage = Stage(answer, [0.002 * index for index in range(50)])
    requests = await stage.run()
    assert stage.target.max_open == 50
    assert set(stage.statuses()) == {Status.OK}
    assert requests["sent_ns"].max() < requests["ended_ns"].min()


async def test_nothing_is_sent_before_the_start() -> None:
    stage = Stage(at_once, [0.0, 0.0])
    requests = await stage.run(start_ns=time.monotonic_ns() + 50_000_000)
    assert requests["sent_ns"].min() >= 0


async def test_a_capped_request_waits_its_turn_and_its_time_counts_from_when_it_was_due() -> None:
    stage = Stage(after(0.02), [0.001 * index for index in range(20)], max_concurrency=2)
    requests = await stage.run()
    assert stage.target.max_open == 2
    assert stage.target.sent == list(range(20))
    assert requests["scheduled_ns"].tolist() == [1_000_000 * index for index in range(20)]
    assert (requests["sent_ns"] - requests["scheduled_ns"])[-1] >= 9 * 20_000_000 - 19_000_000
    assert set(stage.statuses()) == {Status.OK}


async def test_overflow_can_be_dropped() -> None:
    gate = asyncio.Event()

    async def answer(prepared: int, sink: Sink) -> None:
        if prepared < 4:
            await gate.wait()
        sink.tokens(1)

    async def sleep(delay_s: float) -> None:
        nonlocal now_ns
        if delay_s:  # until the last one is due: the first two end meanwhile
            gate.set()
            while not (stage.requests["status"][:2] == Status.OK).all():
                await asyncio.sleep(0)
        now_ns += round(delay_s * 1e9) + 100_000
        await asyncio.sleep(0)

    now_ns = 0
    pacer, due_s = Pacer(lambda: now_ns, sleep), [0.0, 0.0, 0.0, 0.0, 0.5]
    stage = Stage(answer, due_s, pacer=pacer, clock=lambda: now_ns, max_concurrency=2, overflow="drop")
    requests = await stage.run(start_ns=0)
    assert stage.statuses() == [Status.OK, Status.OK, Status.DROPPED, Status.DROPPED, Status.OK]
    assert stage.target.sent == [0, 1, 4]
    assert requests["sent_ns"][2:4].tolist() == [ABSENT, ABSENT]
    assert (requests["ended_ns"][2:4] >= 0).all()


async def test_a_closed_loop_keeps_its_concurrency_and_ignores_arrivals() -> None:
    stage = Stage(after(0.01), [1000.0] * 30, concurrency=3)
    requests = await stage.run()
    assert stage.target.max_open == 3
    assert set(stage.statuses()) == {Status.OK}
    assert (requests["scheduled_ns"] <= requests["sent_ns"]).all()
    ends = sorted(requests["ended_ns"])
    for turn, end_ns in zip(sorted(requests["scheduled_ns"])[3:], ends, strict=False):
        assert turn >= end_ns  # a turn comes when another request is over


@pytest.mark.parametrize("loop", [{}, {"concurrency": 2}])
async def test_answers_without_an_end_are_broken_off_after_the_drain_timeout(loop: dict[str, int]) -> None:
    async def answer(prepared: int, sink: Sink) -> None:
        sink.tokens(1)
        if prepared:
            await never(prepared, sink)

    stage = Stage(answer, [0.0, 0.01, 0.02], drain_timeout_s=0.1, **loop)
    requests = await stage.run()
    assert stage.statuses() == [Status.OK, Status.IN_FLIGHT, Status.IN_FLIGHT]
    assert sorted(stage.target.cancelled) == [1, 2]
    assert requests["ended_ns"][1:].tolist() == [ABSENT, ABSENT]


async def test_a_closed_loop_ends_if_no_answer_does() -> None:
    """Two of six answers end; then the server hangs, before the last request is sent."""

    async def answer(prepared: int, sink: Sink) -> None:
        await (at_once if prepared < 2 else never)(prepared, sink)

    stage = Stage(answer, [0.0] * 6, concurrency=2, drain_timeout_s=0.1)
    await stage.run()
    assert stage.statuses() == [Status.OK] * 2 + [Status.IN_FLIGHT] * 2 + [Status.UNSENT] * 2
    assert sorted(stage.target.cancelled) == [2, 3]


async def test_draining_costs_no_more_for_each_answer_the_more_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests due at once are drained from the first answer on; what that costs delays the others' tokens."""
    num_awaited = 0
    wait = asyncio.wait

    async def counting_wait(tasks: Any, **options: Any) -> Any:
        nonlocal num_awaited
        num_awaited += len(tasks)
        return await wait(tasks, **options)

    monkeypatch.setattr(asyncio, "wait", counting_wait)
    turns = [asyncio.Event() for _ in range(200)]

    async def the_last_one_first(prepared: int, sink: Sink) -> None:
        if prepared < 199:
            await turns[prepared].wait()
        sink.tokens(1)
        turns[prepared - 1].set()

    stage = Stage(the_last_one_first, [0.0] * 200)
    await stage.run()
    assert set(stage.statuses()) == {Status.OK}
    assert num_awaited < 3 * 200


async def test_what_still_waits_at_the_drain_timeout_is_never_sent() -> None:
    stage = Stage(never, [0.0, 0.0, 0.0], max_concurrency=1, drain_timeout_s=0.05)
    await stage.run()
    assert stage.statuses() == [Status.IN_FLIGHT, Status.UNSENT, Status.UNSENT]
    assert stage.target.sent == [0]


@pytest.mark.parametrize("settings", [{}, {"concurrency": 1}, {"max_concurrency": 1}])
async def test_stopping_leaves_what_is_under_way_and_sends_no_more(settings: dict[str, int]) -> None:
    stage = Stage(never, [0.0, 0.0 if settings == {"max_concurrency": 1} else 1000.0, 1000.0], **settings)

    async def stop() -> None:
        while not stage.target.num_open:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # the second request waits in the client by now, where it may
        stage.sender.stop()

    await asyncio.gather(stage.run(), stop())
    await asyncio.sleep(0.02)
    assert stage.statuses() == [Status.IN_FLIGHT, Status.UNSENT, Status.UNSENT]
    assert (stage.target.sent, stage.target.cancelled) == ([0], [0])


@pytest.mark.parametrize("loop", [{}, {"concurrency": 1}])
async def test_calls_are_cancelled_on_purpose_after_so_many_tokens(loop: dict[str, int]) -> None:
    async def answer(prepared: int, sink: Sink) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
            sink.tokens(1)

    stage = Stage(answer, [0.0] * 3, cancel_after=[0, 2, 0], **loop)
    requests = await stage.run()
    assert stage.statuses() == [Status.OK, Status.CANCELLED, Status.OK]
    assert requests["num_tokens"].tolist() == [6, 2, 6]
    assert stage.target.cancelled == [1]
    assert requests["ended_ns"][1] >= requests["last_ns"][1]


@pytest.mark.parametrize("loop", [{}, {"concurrency": 2}])
async def test_an_answer_that_ends_with_the_token_it_is_cancelled_after_takes_no_slot_away(
    loop: dict[str, int],
) -> None:
    async def answer(prepared: int, sink: Sink) -> None:  # all tokens in one read, as of a busy HTTP server
        await asyncio.sleep(0)
        sink.tokens(1)
        sink.tokens(1)

    stage = Stage(answer, [0.0] * 8, cancel_after=[1] * 8, **loop)
    async with asyncio.timeout(HANG_S):
        await stage.run()
    assert stage.target.sent == list(range(8))
    assert set(stage.statuses()) == {Status.OK}


async def test_every_kind_of_end_is_told_apart() -> None:
    async def answer(prepared: int, sink: Sink) -> None:
        if prepared == 0:
            raise RequestFailedError("the server said no")
        if prepared == 1:
            raise RequestTimedOutError("no end within 1 s")
        if prepared == 2:
            return
        if prepared == 3:
            raise ZeroDivisionError("a bug")
        sink.tokens(1)
        if prepared == 5:
            raise RequestFailedError("the server said no")

    stage = Stage(answer, [0.0] * 6)
    requests = await stage.run()
    assert stage.statuses() == [Status.ERROR, Status.TIMEOUT, Status.ERROR, Status.ERROR, Status.OK, Status.ERROR]
    assert [stage.errors[number] if number >= 0 else "" for number in requests["error"]] == [
        "the server said no",
        "no end within 1 s",
        "the answer ended without a token",
        "defect of the load generator: ZeroDivisionError: a bug",
        "",
        "the server said no",
    ]
    assert (requests["ended_ns"] >= requests["sent_ns"]).all()


async def test_later_requests_are_made_in_the_idle_time_before_they_are_due() -> None:
    made: list[int] = []

    def make(index: int) -> int:
        made.append(index)
        return index

    async def sleep(delay_s: float) -> None:
        nonlocal now_ns
        if delay_s:  # until the next one is due: a tenth of a second in which it is made, or the test never ends
            while len(made) <= len(stage.target.sent):
                await asyncio.sleep(0)
            now_ns += round(delay_s * 1e9)
        now_ns += 100_000
        await asyncio.sleep(0)

    now_ns = 0
    pacer, due_s = Pacer(lambda: now_ns, sleep), [0.0, 0.1, 0.2, 0.3, 0.4]
    stage = Stage(at_once, due_s, pacer=pacer, clock=lambda: now_ns, budget=1, make=make)
    assert made == [0]
    async with asyncio.timeout(HANG_S):
        await stage.run(start_ns=0)
    assert set(stage.statuses()) == {Status.OK}
    assert made == stage.target.sent == [0, 1, 2, 3, 4]


async def test_a_busy_answer_delays_others_visibly() -> None:
    async def hold_up(prepared: int, sink: Sink) -> None:
        if prepared == 0:
            until_s = time.monotonic() + 0.2
            while time.monotonic() < until_s:
                pass
        sink.tokens(1)

    stage = Stage(hold_up, [0.0, 0.01, 0.02])
    requests = await stage.run()
    lag_ms = (requests["sent_ns"] - requests["scheduled_ns"]) / 1e6
    assert (lag_ms[1:] >= [189, 179]).all()


def refusing(times: int, retry_after_s: float | None = 0.02) -> Answer:
    """Refuses every request this many times, with a new ticket each time, and answers it then."""
    seen: dict[int, int] = {}

    async def answer(prepared: int, sink: Sink) -> None:
        seen[prepared] = seen.get(prepared, 0) + 1
        if seen[prepared] <= times:
            raise RequestRefusedError("infeasible", retry_after_s, f"ticket {seen[prepared]}")
        sink.tokens(1)

    return answer


async def test_a_refused_request_comes_back_when_told_with_its_ticket() -> None:
    stage = Stage(refusing(2), [0.0], max_retries=3)
    (row,) = await stage.run()
    assert stage.statuses() == [Status.OK]
    assert stage.target.tickets == ["", "ticket 1", "ticket 2"]
    assert row["num_retries"] == 2
    assert row["sent_ns"] < 20_000_000 < row["retry_due_ns"] <= row["resent_ns"] <= row["first_ns"]
    assert row["scheduled_ns"] == 0


@pytest.mark.parametrize(("max_retries", "retry_after_s"), [(0, 0.02), (1, 0.02), (3, None)])
async def test_a_refused_request_ends_without_a_time_or_a_retry_left(
    max_retries: int, retry_after_s: float | None
) -> None:
    stage = Stage(refusing(2, retry_after_s), [0.0], max_retries=max_retries)
    (row,) = await stage.run()
    assert stage.statuses() == [Status.REFUSED]
    assert stage.errors == ["infeasible"]
    assert row["num_retries"] == (0 if retry_after_s is None else max_retries)
    assert row["ended_ns"] != ABSENT


async def test_waiting_for_a_retry_holds_no_other_request_up() -> None:
    stage = Stage(refusing(1, 0.05), [0.0, 0.001, 0.002], max_retries=1)
    rows = await stage.run()
    assert stage.statuses() == [Status.OK] * 3
    assert stage.target.sent[:3] == [0, 1, 2]
    assert (rows["sent_ns"] < 50_000_000).all()
