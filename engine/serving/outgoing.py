"""Unsent messages to one frontend, merged instead of queued.

The rows of several steps are merged and a new status replaces an unsent one, so that a slow receiver costs memory only
for its tokens, and that is bounded. `server.py` takes the next message and writes it; no sockets here.

Steps whose reports come together (`coalescing.py`) are merged too.
"""

import asyncio
from collections import deque
from typing import Protocol

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.outputs import RequestOutput
from engine.interfaces import LoopSnapshot
from engine.serving.client_errors import CallRefused
from engine.serving.packing import StepColumns, load_message

# StepResults a frontend may leave unacknowledged before the rows of further steps are merged.
STEP_WINDOW = 64
# A frontend with more unsent tokens and log-probabilities will not catch up: its stream is ended to bound the engine's
# memory, of which each takes up to 80 bytes.
MAX_UNSENT_VALUES = 1 << 21
# Tokens and log-probabilities from which a message is full: the rows of further steps go into the next one. Frontends
# take no message above 16 MiB, which the alternatives of merged steps can exceed.
MAX_MESSAGE_VALUES = 1 << 20
MAX_UNSENT_ADMISSIONS = 4096
# How long a finished stream stays open for the last acknowledgement. In grpc.aio a write that meets the end of a stream
# fails the whole call, including unread messages: a frontend would lose its last rows. During a drain frontends
# acknowledge every step at once, so that only a stopped frontend delays the end.
LINGER_S = 1.0


class Receiver(Protocol):
    """What a `Session` tells about its requests, by handle: an `Outgoing`, or the calls of another API."""

    @property
    def is_full(self) -> bool:
        """Whether too much is unsent to read further submissions."""
        ...

    def accept(self, handle: int) -> None:
        """Adds an accepted submission."""

    def reject(self, rejection: pb.Rejection) -> None:
        """Adds a rejected submission."""

    def add_output(
        self, handle: int, epoch: int, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int
    ) -> None:
        """Adds the output of a step for one request."""

    def end_step(self) -> None:
        """Notes that all outputs of a step have been added."""

    def complete(self, completion: pb.Completion) -> None:
        """Adds the completion of a request that ended outside a step."""

    def has_unsent_end(self, handle: int) -> bool:
        """Whether the handle cannot be used again yet."""
        ...

    def acknowledge(self, step_seq: int) -> None:
        """Notes that the frontend has processed the messages up to this one."""

    def set_status(self, status: pb.EngineStatus) -> None:
        """Notes the newest state of the engine."""

    def announce_drain(self, notice: pb.DrainNotice) -> None:
        """Announces that the engine drains."""

    def close(self) -> None:
        """Sends what is there; nothing follows."""


class Outgoing:
    """The messages to one frontend; lives on the event loop.

    Order: an admission precedes everything else about its handles, unless the first other event of a handle stands for
    it. Within a request, rows come in order and the completion last.
    """

    def __init__(self) -> None:
        self._merged_steps: set[int] = set()  # steps with rows in the columns
        self._wake = asyncio.Event()
        self._accepted: dict[int, None] = {}  # handles without a later event
        self._rejections: list[pb.Rejection] = []
        self._drain_notice: pb.DrainNotice | None = None
        self._status: pb.EngineStatus | None = None
        self._columns = StepColumns()
        # Messages before these columns, without their numbers, and the values in each.
        self._full: deque[tuple[pb.StepResult, int]] = deque()
        self._num_full_values = 0  # tokens and log-probabilities in them
        self._newest: tuple[LoopSnapshot, int] | None = None  # of the newest row: snapshot, sampled_at_ns
        self._sent_step_seq = 0
        self._acked_step_seq = 0
        self._refusal: CallRefused | None = None
        self._closes_at_s: float | None = None  # event loop's clock; None while the stream is open

    @property
    def is_full(self) -> bool:
        """Whether too many admissions are unsent to read further submissions, or the stream ends with a status."""
        return self._refusal is not None or len(self._accepted) + len(self._rejections) >= MAX_UNSENT_ADMISSIONS

    def accept(self, handle: int) -> None:
        """Adds an accepted submission. An event of it before the next message stands for it."""
        self._accepted[handle] = None
        self._wake.set()

    def reject(self, rejection: pb.Rejection) -> None:
        """Adds a rejected submission."""
        self._rejections.append(rejection)
        self._wake.set()

    def add_output(
        self, handle: int, epoch: int, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int
    ) -> None:
        """Adds the output of a step for one request; `end_step` sends it."""
        if self._refusal is not None:
            return
        self._accepted.pop(handle, None)
        self._columns.add(handle, epoch, output)
        self._newest = (snapshot, sampled_at_ns)
        self._merged_steps.add(snapshot.engine_step)
        num_unsent = self._num_full_values + self._columns.num_values
        if num_unsent > MAX_UNSENT_VALUES:
            detail = f"{num_unsent} tokens and log-probabilities are unread, at most {MAX_UNSENT_VALUES} are kept"
            self.refuse(CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, detail))

    def end_step(self) -> None:
        """Sends the rows of a step after all have been added."""
        if not self._columns:
            return
        if self._columns.num_values >= MAX_MESSAGE_VALUES:
            num_values = self._columns.num_values
            self._full.append((self._to_message(), num_values))
            self._num_full_values += num_values
        self._wake.set()

    def complete(self, completion: pb.Completion) -> None:
        """Adds the completion of a request that ended outside a step."""
        if self._refusal is not None:
            return
        self._accepted.pop(completion.handle, None)
        self._columns.add_completion(completion)
        self._wake.set()

    def has_unsent_end(self, handle: int) -> bool:
        """Whether the completion of the handle is unsent, so that the frontend cannot reuse it yet."""
        return self._columns.has_ended(handle) or any(
            completion.handle == handle for message, _ in self._full for completion in message.completions
        )

    def acknowledge(self, step_seq: int) -> None:
        """Notes that the frontend has processed the StepResults up to this one.

        Raises: CallRefused: that StepResult was never sent.
        """
        if step_seq > self._sent_step_seq:
            detail = f"ack of step_seq {step_seq}, but only {self._sent_step_seq} were sent"
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, detail)
        self._acked_step_seq = max(self._acked_step_seq, step_seq)
        self._wake.set()

    def set_status(self, status: pb.EngineStatus) -> None:
        """Replaces a status that is not sent yet."""
        self._status = status
        self._wake.set()

    def announce_drain(self, notice: pb.DrainNotice) -> None:
        """Announces that the engine drains."""
        self._drain_notice = notice
        self._wake.set()

    def refuse(self, refusal: CallRefused) -> None:
        """Ends the stream with a status; drops unsent rows, and those to come.

        A frontend that reads nothing may never let the message end that is being written, and with it the stream.
        """
        self._refusal = refusal
        self._columns = StepColumns()
        self._full.clear()
        self._wake.set()

    def close(self, linger_s: float = LINGER_S) -> None:
        """Sends everything regardless of the window; ends the stream once acknowledged or after `linger_s`."""
        self._closes_at_s = asyncio.get_running_loop().time() + linger_s
        self._wake.set()

    async def next_message(self) -> pb.AttachResponse | None:
        """Waits for the next message to send; None ends the stream.

        Raises: CallRefused: the stream must end with a status.
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
            self._accepted, self._rejections = {}, []
            return pb.AttachResponse(admission=admission)
        if self._drain_notice is not None:
            notice, self._drain_notice = self._drain_notice, None
            return pb.AttachResponse(drain=notice)
        if self._status is not None:
            status, self._status = self._status, None
            return pb.AttachResponse(status=status)
        if (self._full or self._columns) and (self._is_window_open or self._closes_at_s is not None):
            return pb.AttachResponse(step=self._take_step())
        return None

    @property
    def _is_window_open(self) -> bool:
        return self._sent_step_seq - self._acked_step_seq < STEP_WINDOW

    def _take_step(self) -> pb.StepResult:
        if self._full:
            step, num_values = self._full.popleft()
            self._num_full_values -= num_values
        else:
            step = self._to_message()
        self._sent_step_seq += 1
        step.step_seq = self._sent_step_seq
        return step

    def _to_message(self) -> pb.StepResult:
        """Returns the columns as a message and empties them."""
        step = self._columns.to_message()
        self._columns = StepColumns()
        step.num_steps = len(self._merged_steps)
        self._merged_steps.clear()
        if self._newest is not None:
            snapshot, step.sampled_at_ns = self._newest
            step.engine_step = snapshot.engine_step
            step.load.CopyFrom(load_message(snapshot))
        return step
