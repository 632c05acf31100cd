"""The step loop: drains the inbox, schedules, launches, collects, updates and reports, on its own thread.

With two steps in flight, the next step is scheduled and launched while the current one runs. The host's work overlaps
with the device's, and the outputs of a step are reported as soon as it ends.

The loop never waits for a socket: commands arrive in an `Inbox`, and reports leave through a callable that must not
block. It knows requests by id, and no streams, handles or protobuf.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from chairlift.service.end_reason import EndReason
from engine.core.outputs import RequestOutput, SchedulerOutput
from engine.core.request import Request, RequestId
from engine.core.scheduler import Scheduler
from engine.errors import EngineDraining, IntegrityError, RequestError
from engine.interfaces import (
    AdmissionReport,
    CacheReport,
    Cancel,
    Command,
    DrainReport,
    Fence,
    FencePassed,
    GrantCredit,
    Inbox,
    LoopSnapshot,
    ModelRunner,
    Report,
    StepReport,
    StepTimes,
    Submit,
)

# How long an idle iteration waits for a command. `loop_turns` keeps counting meanwhile, so that heartbeats (every 250
# ms) reveal a frozen loop.
IDLE_TURN_S = 0.05

StepListener = Callable[[SchedulerOutput, list[RequestOutput], LoopSnapshot, StepTimes], None]
"""Called after every step with its plan, its outputs, the state of the loop and its times; must not block."""

_log = logging.getLogger(__name__)


class _Launched(NamedTuple):
    """A step in flight; start and end of its scheduling in perf_counter nanoseconds."""

    plan: SchedulerOutput
    started_ns: int
    scheduled_ns: int


class StepLoop:
    """Runs scheduler and runner until `drain` or `stop`.

    Between two iterations at most `max_steps_in_flight - 1` steps are in flight.

    `drain` and `stop` may be called from any thread and from a signal handler that interrupts the loop: they set a flag
    and wake the loop. All other methods belong to the thread that calls `run`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        inbox: Inbox,
        outbox: Callable[[Report], None],
        *,
        on_step: StepListener | None = None,
        num_late_compiles: Callable[[], int] = lambda: 0,
        integrity_check_interval_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_late_compiles = num_late_compiles
        self._scheduler = scheduler
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._on_step = on_step
        self._clock = clock
        self._open: set[RequestId] = set()  # accepted, and not completed yet
        self._in_flight: deque[_Launched] = deque()
        self._num_launched = 0
        self._fences: deque[tuple[int, int]] = deque()  # number, and steps launched before it
        self._collected_ns = 0  # when the last step was, perf_counter
        self._num_turns = 0
        self._was_productive = True  # of the steps last collected one had rows or outputs: do not wait
        self._stop_requested = False
        self._drain_grace_s: float | None = None
        self._drain_until_s: float | None = None
        self._integrity_check_interval_s = integrity_check_interval_s  # 0: no checks
        self._next_check_s = clock() + integrity_check_interval_s
        self._num_integrity_checks = 0
        self._num_integrity_failures = 0
        self._num_prompt_tokens_total = 0
        self.num_drained = 0
        self.num_cut = 0
        self.snapshot = LoopSnapshot(engine_step=0, loop_turns=0, stats=scheduler.stats())

    def run(self) -> None:
        """Runs until drained or stopped; finishes the steps in flight.

        Raises:
            IntegrityError: the KV cache accounting is inconsistent.
            Exception: a step failed otherwise. In either case the engine must not continue.
        """
        while not self._stop_requested and (self._drain_until_s is None or self._open):
            self.turn()
        while self._in_flight:
            self._collect()
        self.num_cut = self.num_cut or len(self._open)  # by `stop`

    def drain(self, grace_s: float) -> None:
        """Takes nothing new from now on, finishes what is there within `grace_s`, cancels the rest, then lets `run`
        return.
        """
        self._drain_grace_s = grace_s
        self._inbox.wake()

    def stop(self) -> None:
        """Makes `run` return after the steps in flight."""
        self._stop_requested = True
        self._inbox.wake()

    def turn(self) -> None:
        """Runs one iteration: applies commands, launches a step if there is work, and collects the oldest steps."""
        commands = self._inbox.drain(self._idle_s())
        self._num_turns += 1
        now_s = self._clock()
        self._follow_drain(now_s)
        self._apply(commands, now_s)
        self._check_integrity(now_s)
        # If the plan is empty, collect what is in flight until there is work: there is nothing to overlap with.
        is_busy = self._is_due(now_s) and self._launch(now_s)
        num_left = self._scheduler.max_steps_in_flight - 1 if is_busy else 0
        if len(self._in_flight) <= num_left:
            self._publish(self.snapshot.engine_step)
        else:
            self._was_productive = False
        while len(self._in_flight) > num_left:
            self._collect()
            if not is_busy and self._scheduler.has_work():
                break
        while self._fences and self._fences[0][1] <= self._num_launched - len(self._in_flight):
            self._outbox(FencePassed(self._fences.popleft()[0]))

    def _idle_s(self) -> float:
        """How long to wait for a command: 0 while steps are in flight or the last one with work did something."""
        if self._in_flight or (self._was_productive and self._scheduler.has_work()):
            return 0.0
        deadline_s = self._scheduler.next_deadline_s
        return IDLE_TURN_S if deadline_s is None else min(IDLE_TURN_S, max(0.0, deadline_s - self._clock()))

    def _is_due(self, now_s: float) -> bool:
        deadline_s = self._scheduler.next_deadline_s
        return self._scheduler.has_work() or (deadline_s is not None and deadline_s <= now_s)

    def _launch(self, now_s: float) -> bool:
        """Schedules and launches a step; returns whether it has rows."""
        started_ns = time.perf_counter_ns()
        plan = self._scheduler.schedule(now_s)
        scheduled_ns = time.perf_counter_ns()
        self._runner.launch(plan)
        self._scheduler.learn()
        self._in_flight.append(_Launched(plan, started_ns, scheduled_ns))
        self._num_launched += 1
        return bool(plan.rows)

    def _collect(self) -> None:
        """Waits for the oldest step and reports its outputs."""
        plan, started_ns, scheduled_ns = self._in_flight.popleft()
        result = self._runner.collect()
        executed_ns = time.perf_counter_ns()
        sampled_at_ns = time.monotonic_ns()
        outputs = self._scheduler.update(plan, result, self._clock())

        self._note_completions(outputs)
        self._was_productive |= bool(plan.rows or outputs)
        since_ns, self._collected_ns = self._collected_ns, executed_ns
        times = StepTimes(max(started_ns, since_ns), max(scheduled_ns, since_ns), executed_ns, time.perf_counter_ns())
        if plan.rows:
            self._num_prompt_tokens_total += _num_prompt_tokens(plan)
            self._publish(self.snapshot.engine_step + 1, times, plan.num_tokens)
        else:
            self._publish(self.snapshot.engine_step)
        if outputs:
            self._outbox(StepReport(tuple(outputs), self.snapshot, sampled_at_ns))
        if cache_events := self._scheduler.take_cache_events():
            self._outbox(CacheReport(cache_events))
        if self._on_step is not None:
            self._on_step(plan, outputs, self.snapshot, times)

    def _apply(self, commands: list[Command], now_s: float) -> None:
        """Applies cancels first, so that new requests can use the freed blocks. A cancel of a request that is submitted
        in the same batch of commands is applied after it.
        """
        if not commands:
            return
        submits = [command for command in commands if isinstance(command, Submit)]
        cancels = [command for command in commands if isinstance(command, Cancel)]
        new_ids = {request.request_id for command in submits for request in command.requests}
        for cancel in cancels:
            self._cancel((i for i in cancel.request_ids if i not in new_ids), now_s, cancel.reason)
        if submits:
            self._admit([request for command in submits for request in command.requests])
            for cancel in cancels:
                self._cancel((i for i in cancel.request_ids if i in new_ids), now_s, cancel.reason)
        for command in commands:
            if isinstance(command, Fence):
                self._fences.append((command.number, self._num_launched))
            elif isinstance(command, GrantCredit):
                for request_id, tokens in command.grants:
                    self._scheduler.grant_credit(request_id, tokens, now_s)

    def _admit(self, requests: list[Request]) -> None:
        accepted: list[RequestId] = []
        rejected: list[tuple[RequestId, RequestError]] = []
        for request in requests:
            try:
                if self._drain_until_s is not None:
                    raise EngineDraining("the engine is draining and accepts no new requests")
                self._scheduler.add_request(request)
            except RequestError as error:
                rejected.append((request.request_id, error))
            else:
                accepted.append(request.request_id)
                _log.debug(
                    "request %d is %r: %d prompt tokens", request.request_id, request.label, len(request.prompt_ids)
                )
        self._open.update(accepted)
        self._outbox(AdmissionReport(tuple(accepted), tuple(rejected)))

    def _cancel(self, request_ids: Iterable[RequestId], now_s: float, reason: EndReason) -> None:
        for request_id in request_ids:
            if request_id in self._open:
                self._scheduler.cancel(request_id, now_s, reason)

    def _follow_drain(self, now_s: float) -> None:
        if self._drain_grace_s is None:
            return
        if self._drain_until_s is None:
            self._drain_until_s = now_s + self._drain_grace_s
            self._outbox(DrainReport(self._drain_grace_s))
        if now_s >= self._drain_until_s and self._open and not self.num_cut:
            self.num_cut = len(self._open)
            self._cancel(list(self._open), now_s, EndReason.CANCELLED)

    def _check_integrity(self, now_s: float) -> None:
        """Checks the KV cache accounting at an interval. If it is wrong, a request might read the cache of another: the
        engine stops rather than serve wrong results.
        """
        if not self._integrity_check_interval_s or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + self._integrity_check_interval_s
        self._num_integrity_checks += 1
        try:
            self._scheduler.check_integrity()
        except IntegrityError as error:
            self._num_integrity_failures += 1
            self._publish(self.snapshot.engine_step)
            raise IntegrityError(
                f"KV cache accounting is inconsistent; stopping to avoid serving wrong results: {error}"
            ) from error

    def _note_completions(self, outputs: list[RequestOutput]) -> None:
        finished = [output.request_id for output in outputs if output.completion is not None]
        self._open.difference_update(finished)
        if self._drain_until_s is not None and not self.num_cut:
            self.num_drained += len(finished)

    def _publish(self, engine_step: int, times: StepTimes | None = None, num_tokens: int = 0) -> None:
        last = self.snapshot
        self.snapshot = LoopSnapshot(
            engine_step=engine_step,
            loop_turns=self._num_turns,
            stats=self._scheduler.stats(),
            step_us=last.step_us if times is None else times.step_us,
            execute_us=last.execute_us if times is None else times.execute_us,
            num_batched_tokens=last.num_batched_tokens if times is None else num_tokens,
            num_prompt_tokens_total=self._num_prompt_tokens_total,
            num_late_compiles=self._num_late_compiles(),
            num_integrity_checks=self._num_integrity_checks,
            num_integrity_failures=self._num_integrity_failures,
        )


def _num_prompt_tokens(plan: SchedulerOutput) -> int:
    """Tokens in rows of more than one token, which come last. A plan with drafts has no prompts."""
    total = 0
    if plan.drafts:
        return 0
    for row in reversed(plan.rows):
        if row.num_scheduled_tokens == 1:
            break
        total += row.num_scheduled_tokens
    return total
