"""Sends a worker's shard of a workload on one event loop: each request when it is due, whatever the server does.

Knows neither processes nor protocols. In an open loop the schedule is fixed beforehand: a request that
`max_concurrency` delays waits here, and its latency counts from its scheduled time. In a closed loop a request is due
when another one ends. A refused request may come back at the time that the server names; it remains one request, which
was due when it was first due, and it keeps its place under `max_concurrency`.
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from loadgen.record import Status
from loadgen.run.pacing import Pacer
from loadgen.run.preparer import Preparer
from loadgen.run.recorder import CallNotes, Recorder
from loadgen.target.base import RequestFailedError, RequestRefusedError, RequestTimedOutError, Target

_PREPARE_AHEAD_NS = 5_000_000  # preparing holds up the event loop: never shortly before a request is due
_NS_PER_TOKEN = 150  # to draw, encode and copy; an upper guess
_CHECK_S = 0.001


@dataclass(frozen=True, slots=True)
class Shard:
    """Requests of one worker.

    Attributes:
        order: indices of the requests, in the order in which they are due.
        due_ns: when each is due, from the start; unused in a closed loop.
        cancel_after: tokens after which each is cancelled on purpose; 0 is never.
        concurrency: requests always in flight; None is an open loop.
        max_concurrency: most requests in flight; None is no limit.
        overflow: see RunOptions.
        drain_timeout_s, max_retries: see RunOptions.
    """

    order: Sequence[int]
    due_ns: Sequence[int]
    cancel_after: Sequence[int]
    concurrency: int | None = None
    max_concurrency: int | None = None
    overflow: Literal["queue", "drop"] = "queue"
    drain_timeout_s: float = 600.0
    max_retries: int = 0


class Sender:
    """Runs one shard, once.

    Args:
        target: where requests go.
        preparer: makes them, in the order of the shard.
        recorder: takes notes.
        shard: what is run.
        pacer: waits; on the recorder's clock.
    """

    def __init__(self, target: Target, preparer: Preparer, recorder: Recorder, shard: Shard, pacer: Pacer) -> None:
        self._target = target
        self._preparer = preparer
        self._recorder = recorder
        self._shard = shard
        self._pacer = pacer
        self._calls: set[asyncio.Task[None]] = set()
        self._waiting: deque[tuple[int, int]] = deque()
        self._next_due_ns: int | None = None
        self._over = asyncio.Event()

    async def run(self, start_ns: int) -> None:
        """Sends all requests; returns when each has ended, the drain timeout has passed, or `stop` was called.

        Args:
            start_ns: the start, on the recorder's clock.
        """
        self._recorder.start(start_ns)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._prepare_in_idle_time())]
        try:
            sending = asyncio.create_task(self._closed_loop() if self._shard.concurrency else self._open_loop(start_ns))
            over = asyncio.create_task(self._over.wait())
            tasks += [sending, over]
            await asyncio.wait([sending, over], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await _cancel(tasks)
            await _cancel(self._calls)

    def stop(self) -> None:
        """Ends `run`: nothing more is sent; calls in flight are cancelled and stay IN_FLIGHT."""
        self._over.set()

    async def _open_loop(self, start_ns: int) -> None:
        shard = self._shard
        for index, due_ns, cancel_after in zip(shard.order, shard.due_ns, shard.cancel_after, strict=True):
            self._next_due_ns = start_ns + due_ns
            await self._pacer.until(self._next_due_ns)
            if shard.max_concurrency is None or len(self._calls) < shard.max_concurrency:
                self._start(index, cancel_after)
                await asyncio.sleep(0)  # it is sent now, not after those that are due at the same time
            elif shard.overflow == "drop":
                self._preparer.drop(index)
                self._recorder.ended(index, Status.DROPPED)
            else:
                self._waiting.append((index, cancel_after))
        self._next_due_ns = None
        try:
            async with asyncio.timeout(shard.drain_timeout_s):
                while self._calls:  # those that waited begin meanwhile
                    await asyncio.wait(self._calls)
        except TimeoutError:
            self._waiting.clear()

    async def _closed_loop(self) -> None:
        turns = deque(zip(self._shard.order, self._shard.cancel_after, strict=True))
        one_began = asyncio.Event()

        async def take_turns() -> None:
            while turns:
                index, cancel_after = turns.popleft()
                self._recorder.scheduled_ns[index] = self._recorder.now_ns()
                call = self._start(index, cancel_after)
                one_began.set()
                await asyncio.wait([call])  # not `await call`: one that ends before its cancellation arrives raises

        assert self._shard.concurrency is not None
        await self._pacer.until(self._recorder.start_ns)
        slots = [asyncio.create_task(take_turns()) for _ in range(self._shard.concurrency)]
        try:
            while turns:
                one_began.clear()
                async with asyncio.timeout(self._shard.drain_timeout_s):  # a hanging server would never end the run
                    await one_began.wait()
            await asyncio.wait(slots, timeout=self._shard.drain_timeout_s)
        except TimeoutError:
            pass  # what is in flight is broken off
        finally:
            await _cancel(slots)

    def _start(self, index: int, cancel_after: int) -> asyncio.Task[None]:
        call = asyncio.create_task(self._call(index, cancel_after))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        return call

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if self._waiting and not self._over.is_set():
            self._start(*self._waiting.popleft())

    async def _call(self, index: int, cancel_after: int) -> None:
        recorder = self._recorder
        task = asyncio.current_task()
        assert task is not None
        notes = CallNotes(recorder, index, cancel_after, task.cancel)
        try:
            await self._send(index, notes)
        except asyncio.CancelledError:
            if not notes.is_cancelled:
                raise
            recorder.ended(index, Status.CANCELLED)
        except RequestTimedOutError as error:
            recorder.ended(index, Status.TIMEOUT, str(error))
        except RequestRefusedError as error:
            recorder.ended(index, Status.REFUSED, str(error))
        except RequestFailedError as error:
            recorder.ended(index, Status.ERROR, str(error))
        except Exception as error:  # a defect of ours must not look like a request that never ended
            recorder.ended(index, Status.ERROR, f"defect of the load generator: {type(error).__name__}: {error}")
        else:
            if notes.num_tokens:
                recorder.ended(index, Status.OK)
            else:
                recorder.ended(index, Status.ERROR, "the answer ended without a token")

    async def _send(self, index: int, notes: CallNotes) -> None:
        """Sends a request, and while it is refused with a time and may come back, again at that time."""
        prepared = self._preparer.take(index)
        ticket = ""
        for retries_left in range(self._shard.max_retries, -1, -1):
            try:
                await self._target.send(prepared, notes, ticket)
            except RequestRefusedError as error:
                if not retries_left or error.retry_after_s is None:
                    raise
                ticket, retry_after_s = error.retry_ticket, error.retry_after_s
            else:
                return
            self._recorder.will_retry(index, self._recorder.now_ns() + round(1e9 * retry_after_s))
            await asyncio.sleep(retry_after_s)

    async def _prepare_in_idle_time(self) -> None:
        while not self._preparer.is_done:
            if self._preparer.has_room and self._has_time(self._preparer.next_tokens):
                self._preparer.prepare_one()
            await asyncio.sleep(_CHECK_S)

    def _has_time(self, tokens: int) -> bool:
        if self._next_due_ns is None:
            return True
        return self._next_due_ns - self._recorder.clock() > _PREPARE_AHEAD_NS + tokens * _NS_PER_TOKEN


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
