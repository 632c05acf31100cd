"""What one frontend has still to be sent, merged instead of queued.

Rows are merged into rows, a status replaces the status before it: a receiver that lags costs memory for its tokens and
nothing else, and that is bounded too. No sockets here: `server.py` asks for the next message and writes it.

Steps that follow one another quickly are merged on purpose too (coalescing): where a CPU serves many streams of a small
model, a message per step costs a fifth to a third of the time. See `CoalescePolicy`.
"""

import asyncio
from dataclasses import dataclass

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.outputs import RequestOutput
from engine.interfaces import LoopSnapshot
from engine.serving.packing import StepColumns, load_message

# StepResults a frontend may leave unacknowledged before the rows of further steps are merged.
STEP_WINDOW = 64
# A frontend this far behind will not catch up: its stream is ended before it fills the engine's memory. Each
# log-probability of a prompt counts as a token.
MAX_UNSENT_TOKENS = 1 << 20
MAX_UNSENT_ADMISSIONS = 4096
# How long a stream that is done stays open for the last acknowledgement. In grpc.aio a write that meets the end of a
# stream fails the whole call, messages that are there but not read yet included: a frontend would lose its last rows.
# One that has been told of the drain acknowledges every step at once, so only one that has stopped is waited for.
LINGER_S = 1.0


@dataclass(frozen=True, slots=True)
class CoalescePolicy:
    """When a step's rows wait for those of the next steps, so that they leave in one message.

    They wait only if the next step is expected within the delay, and only for rows that nobody waits for: first tokens,
    ends, and whatever ends a request's credit leave at once, with all that waits.

    Attributes:
        max_delay_s: longest time that a token waits; 0: none waits.
        min_streams: fewer rows do not wait: a few streams are never delayed.
    """

    max_delay_s: float = 0.0
    min_streams: int = 8

    def holds(self, *, num_rows: int, waited_s: float, step_s: float) -> bool:
        """Whether rows wait for the next step.

        Args:
            num_rows: streams that have unsent tokens.
            waited_s: since the first of these came.
            step_s: duration of the last step, which is that of the next one as far as anybody knows.
        """
        return num_rows >= self.min_streams and waited_s + step_s <= self.max_delay_s


class StreamRefused(Exception):  # noqa: N818 - reads as the event it is
    """The stream itself cannot go on and ends with a gRPC status."""

    def __init__(self, code: grpc.StatusCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Outgoing:
    """The messages to one frontend; lives on the event loop.

    Order: an admission comes before anything else about its handles; within a request, rows come in order and its
    completion last.

    Args:
        coalescing: when steps are merged although the receiver keeps up.
    """

    def __init__(self, coalescing: CoalescePolicy | None = None) -> None:
        self._coalescing = coalescing or CoalescePolicy()
        self._is_urgent = False  # something unsent must not wait for the next step
        self._held_since_s: float | None = None  # event loop's clock: when the first row came that waits
        self._hold_timer: asyncio.TimerHandle | None = None
        self._merged_steps: set[int] = set()  # whose rows are unsent
        self._wake = asyncio.Event()
        self._accepted: list[int] = []
        self._rejections: list[pb.Rejection] = []
        self._drain_notice: pb.DrainNotice | None = None
        self._status: pb.EngineStatus | None = None
        self._columns = StepColumns()
        self._newest: tuple[LoopSnapshot, int] | None = None  # of the newest row: snapshot, sampled_at_ns
        self._seen_command_seq = 0
        self._sent_step_seq = 0
        self._acked_step_seq = 0
        self._refusal: StreamRefused | None = None
        self._closes_at_s: float | None = None  # event loop's clock; None while the stream is to stay

    @property
    def is_full(self) -> bool:
        """Whether so many answers to submissions are unsent that no more submissions should be read."""
        return len(self._accepted) + len(self._rejections) >= MAX_UNSENT_ADMISSIONS

    def accept(self, handle: int) -> None:
        """A submission was queued."""
        self._accepted.append(handle)
        self._wake.set()

    def reject(self, rejection: pb.Rejection) -> None:
        """A submission was not."""
        self._rejections.append(rejection)
        self._wake.set()

    def add_output(
        self, handle: int, epoch: int, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int
    ) -> None:
        """A step has news of one request. They are sent once the step is complete, see `end_step`."""
        self._columns.add(handle, epoch, output)
        self._newest = (snapshot, sampled_at_ns)
        self._merged_steps.add(snapshot.engine_step)
        if output.time is not None or output.completion is not None or output.prompt_logprobs is not None:
            self._is_urgent = True
        num_unsent = self._columns.num_tokens + self._columns.num_prompt_values
        if num_unsent > MAX_UNSENT_TOKENS:
            detail = f"{num_unsent} tokens wait to be read, at most {MAX_UNSENT_TOKENS} are kept"
            self.refuse(StreamRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, detail))

    def end_step(self) -> None:
        """All of a step's news have been added: sends them, or lets them wait for the next step's."""
        if not self._columns:
            return
        if self._newest is not None and not self._is_urgent and self._closes_at_s is None:
            loop = asyncio.get_running_loop()
            if self._held_since_s is None:
                self._held_since_s = loop.time()
            waited_s = loop.time() - self._held_since_s
            step_s = self._newest[0].step_us / 1e6
            if self._coalescing.holds(num_rows=self._columns.num_rows, waited_s=waited_s, step_s=step_s):
                if self._hold_timer is None:
                    self._hold_timer = loop.call_later(self._coalescing.max_delay_s, self._send_now)
                return
        self._send_now()

    def complete(self, completion: pb.Completion) -> None:
        """A request has ended without a step."""
        self._columns.add_completion(completion)
        self._send_now()

    def has_unsent_end(self, handle: int) -> bool:
        """Whether the frontend cannot know yet that the handle is free again."""
        return self._columns.has_ended(handle)

    def see_commands(self, command_seq: int) -> None:
        """The step loop has seen the commands up to this one."""
        self._seen_command_seq = command_seq

    def acknowledge(self, step_seq: int) -> None:
        """The frontend has processed the StepResults up to this one.

        Raises: StreamRefused: it cannot have.
        """
        if step_seq > self._sent_step_seq:
            detail = f"ack of step_seq {step_seq}, but only {self._sent_step_seq} were sent"
            raise StreamRefused(grpc.StatusCode.INVALID_ARGUMENT, detail)
        self._acked_step_seq = max(self._acked_step_seq, step_seq)
        self._wake.set()

    def set_status(self, status: pb.EngineStatus) -> None:
        """Replaces a status that is not sent yet."""
        self._status = status
        self._wake.set()

    def announce_drain(self, notice: pb.DrainNotice) -> None:
        """The engine is about to stop."""
        self._drain_notice = notice
        self._wake.set()

    def refuse(self, refusal: StreamRefused) -> None:
        """Ends the stream with a status, dropping what is not sent."""
        self._refusal = refusal
        self._wake.set()

    def close(self, linger_s: float = LINGER_S) -> None:
        """Ends the stream once everything is sent, whatever the window says, and acknowledged or `linger_s` have
        gone.
        """
        self._closes_at_s = asyncio.get_running_loop().time() + linger_s
        self._send_now()

    async def next_message(self) -> pb.AttachResponse | None:
        """Waits for the next message to send; None when the stream is to end.

        Raises: StreamRefused: the stream is to end with a status.
        """
        while True:
            self._wake.clear()
            if self._refusal is not None:
                raise self._refusal
            if (message := self._take_message()) is not None:
                return message
            if self._closes_at_s is not None and self._acked_step_seq == self._sent_step_seq:
                return None
            try:
                async with asyncio.timeout_at(self._closes_at_s):
                    await self._wake.wait()
            except TimeoutError:
                return None

    def _take_message(self) -> pb.AttachResponse | None:
        if self._accepted or self._rejections:
            admission = pb.AdmissionResult(accepted_handles=self._accepted, rejections=self._rejections)
            self._accepted, self._rejections = [], []
            return pb.AttachResponse(admission=admission)
        if self._drain_notice is not None:
            notice, self._drain_notice = self._drain_notice, None
            return pb.AttachResponse(drain=notice)
        if self._status is not None:
            status, self._status = self._status, None
            return pb.AttachResponse(status=status)
        if self._is_urgent and self._columns and (self._is_window_open or self._closes_at_s is not None):
            return pb.AttachResponse(step=self._take_step())
        return None

    def _send_now(self) -> None:
        """Nothing unsent waits any longer, but for the receiver."""
        self._is_urgent = True
        self._stop_holding()
        self._wake.set()

    def _stop_holding(self) -> None:
        self._held_since_s = None
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    @property
    def _is_window_open(self) -> bool:
        return self._sent_step_seq - self._acked_step_seq < STEP_WINDOW

    def _take_step(self) -> pb.StepResult:
        step = self._columns.to_message()
        self._columns = StepColumns()
        step.num_steps = len(self._merged_steps)
        self._merged_steps.clear()
        self._is_urgent = False
        self._sent_step_seq += 1
        step.step_seq = self._sent_step_seq
        step.last_command_seq = self._seen_command_seq
        if self._newest is not None:
            snapshot, step.sampled_at_ns = self._newest
            step.engine_step = snapshot.engine_step
            step.load.CopyFrom(load_message(snapshot))
        return step
