"""One Attach stream without its socket: handles, commands to be sent, events to be dealt out.

A session ends with its stream and is never reused: whatever a dead session still holds cannot disturb the next one.
Everything here is synchronous and runs on the event loop's thread.
"""

import logging
import time
from collections.abc import Callable
from itertools import repeat
from typing import Protocol

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable, FrontendError, QueueFull, RequestError
from frontend.routing import wire
from frontend.routing.command_outbox import CommandOutbox
from frontend.routing.logprobs import LogprobBatch
from frontend.routing.pending import PendingRequest
from frontend.routing.stream import CancelReason, RequestStream

logger = logging.getLogger(__name__)


class ProtocolViolation(FrontendError):  # noqa: N818 - reads as the reason it is
    """The engine's stream itself cannot be trusted any more; it is dropped and opened anew."""


class GivesBack(Protocol):
    """Takes a request back that the engine cannot serve now, and another one may."""

    def __call__(self, pending: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        """`error` is what its client gets if nobody takes it; `was_taken` says that the engine had taken it."""


class EngineSession:
    """The requests of one Attach stream.

    Invariants: a handle is in use from `submit` until the engine's Completion or Rejection, even if nobody waits for it
    any more; every stream ends with exactly one of finish, fail or close.

    Args:
        vocab_size: token ids at or above it are a fault of the engine.
        step_window: StepResults the engine sends without an acknowledgement.
        wake: called when there are commands to send.
        give_back: gets what this engine is too full for, or has given up because it stops.

    Attributes:
        num_waiting_tokens: prompt tokens of the requests here that have no first token yet.
    """

    def __init__(self, *, vocab_size: int, step_window: int, wake: Callable[[], None], give_back: GivesBack) -> None:
        self._vocab_size = vocab_size
        self._give_back = give_back
        self._outbox = CommandOutbox(step_window=step_window, wake=wake)
        self._streams: dict[int, RequestStream] = {}
        self._requests: dict[int, PendingRequest] = {}
        self._waiting_tokens: dict[int, int] = {}  # by handle
        self.num_waiting_tokens = 0
        self._free_handles: list[int] = []
        self._last_step_seq = 0
        self._heard_at_s = time.monotonic()  # when the engine last sent what it had done, for whomever
        self._lost: RequestError | None = None

    @property
    def num_open(self) -> int:
        """Handles in use."""
        return len(self._streams)

    def submit(self, pending: PendingRequest) -> None:
        """Queues a request under a free handle.

        Raises:
            RequestError: the stream has ended; what `end` was called with.
        """
        if self._lost is not None:
            raise self._lost
        handle = self._free_handles.pop() if self._free_handles else len(self._streams) + 1
        submission = pending.next_submission()
        submission.handle = handle
        submission.token_credit = pending.stream.bind(handle, self)
        self._streams[handle] = pending.stream
        self._requests[handle] = pending
        self._waiting_tokens[handle] = pending.num_prompt_tokens + pending.stream.num_tokens
        self.num_waiting_tokens += self._waiting_tokens[handle]
        self._outbox.submit(submission)

    def grant(self, handle: int, num_tokens: int) -> None:
        """Lets the engine generate more tokens for a request."""
        if handle in self._streams:
            self._outbox.grant(handle, num_tokens)

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Stops a request; its handle stays in use until the engine confirms."""
        if handle in self._streams:
            self._outbox.cancel(handle, reason)

    def acknowledge_at_once(self) -> None:
        """The engine is about to stop, and waits for the acknowledgement of its last step, though not for long."""
        self._outbox.acknowledge_at_once()

    def take_commands(self) -> list[pb.AttachRequest]:
        """All commands that are due, in the order in which they must be sent."""
        return self._outbox.take()

    def end(self, error: RequestError) -> list[PendingRequest]:
        """The stream has ended, and every later submission fails with `error`.

        Returns: the requests that were open and that somebody still waits for.
        """
        if self._lost is None:
            self._lost = error
        self._streams.clear()
        self._waiting_tokens.clear()
        requests, self._requests = self._requests, {}
        open_tickets = [pending for pending in requests.values() if not pending.stream.closed]
        for pending in open_tickets:
            pending.stream.heard_at_s = self._heard_at_s
        return open_tickets

    def deal_admission(self, result: pb.AdmissionResult) -> None:
        """Fails the submissions that the engine did not take, or gives them back."""
        self._heard_at_s = time.monotonic()
        for rejection in result.rejections:
            stream = self._streams.get(rejection.handle)
            if stream is not None and stream.epoch == rejection.epoch:
                pending = self._release(stream)
                error = wire.rejection_error(rejection)
                if isinstance(error, EngineUnavailable | QueueFull):
                    self._return(pending, error, was_taken=False)
                else:
                    stream.fail(error)

    def deal_step(self, step: pb.StepResult) -> None:
        """Deals one step out to its requests and acknowledges it.

        Raises:
            ProtocolViolation: steps are missing, or the columns do not belong together.
        """
        if step.step_seq != self._last_step_seq + 1:
            raise ProtocolViolation(f"step {step.step_seq} came after step {self._last_step_seq}")
        self._last_step_seq = step.step_seq
        self._heard_at_s = time.monotonic()
        for first in step.first_tokens:
            stream = self._streams.get(first.handle)
            if stream is not None and stream.epoch == first.epoch:
                self.num_waiting_tokens -= self._waiting_tokens.pop(first.handle, 0)
                if not stream.num_tokens:  # else it has been told with a first token elsewhere
                    stream.num_cached_tokens = first.num_cached_tokens
        for account in step.time_accounts:
            stream = self._streams.get(account.handle)
            if stream is not None and stream.epoch == account.epoch:
                stream.tell_time(wire.engine_time(account))
        for prompt in step.prompt_logprobs:
            self._deal_prompt_logprobs(step.step_seq, prompt)
        if step.handles:
            self._deal_rows(step)
        for completion in step.completions:
            stream = self._streams.get(completion.handle)
            if stream is not None and stream.epoch == completion.epoch:
                self._complete(self._release(stream), completion)
        self._outbox.acknowledge(step.step_seq)

    def _deal_prompt_logprobs(self, step_seq: int, prompt: pb.PromptLogprobs) -> None:
        stream = self._streams.get(prompt.handle)
        if stream is None or stream.epoch != prompt.epoch or stream.closed:
            return
        try:
            if stream.prompt_logprobs is None:
                raise ValueError("prompt log-probabilities that nobody asked for")
            stream.prompt_logprobs.add(prompt.start_index, wire.prompt_columns(prompt))
        except ValueError as error:
            raise ProtocolViolation(f"step {step_seq}, handle {prompt.handle}: {error}") from error

    def _deal_rows(self, step: pb.StepResult) -> None:
        handles, starts, token_ids = list(step.handles), list(step.start_indices), list(step.token_ids)
        counts = list(step.token_counts) or [1] * len(handles)
        epochs = list(step.epochs) or repeat(0, len(handles))
        if not (len(starts) == len(counts) == len(handles) and sum(counts) == len(token_ids)):
            raise ProtocolViolation(
                f"step {step.step_seq}: {len(handles)} handles, {len(starts)} start_indices, {len(counts)} "
                f"token_counts of {sum(counts)} tokens, {len(token_ids)} token_ids"
            )
        logprobs = wire.row_logprobs(step.logprobs, counts) if step.logprobs.rows else {}
        ids_are_known = max(token_ids, default=0) < self._vocab_size
        position = 0
        for row, (handle, epoch, start, count) in enumerate(zip(handles, epochs, starts, counts, strict=True)):
            ids = token_ids[position : position + count]
            position += count
            stream = self._streams.get(handle)
            # A row may be late: of a request that has been cancelled, or of an epoch before. It belongs to nobody.
            if stream is not None and stream.epoch == epoch and not stream.closed:
                if not ids_are_known and max(ids, default=0) >= self._vocab_size:
                    self._fault(stream, f"the engine sent token {max(ids)}, the vocabulary has {self._vocab_size}")
                else:
                    self._push(stream, start, ids, logprobs.get(row))

    def _push(self, stream: RequestStream, start: int, ids: list[int], logprobs: LogprobBatch | None) -> None:
        try:
            stream.push(start, ids, logprobs)
        except EngineFault as fault:
            self._fault(stream, fault.message)

    def _fault(self, stream: RequestStream, message: str) -> None:
        logger.error("handle %d: %s", stream.handle, message)
        stream.fail(EngineFault(message))
        self.cancel(stream.handle, CancelReason.CLIENT)

    def _complete(self, pending: PendingRequest, completion: pb.Completion) -> None:
        stream = pending.stream
        account = wire.engine_account(completion)
        if completion.reason == pb.COMPLETION_REASON_CANCELLED and not stream.closed:  # not by us
            stream.tell_time(account)
            self._return(pending, wire.completion_error(completion), was_taken=True)
            return
        stream.tell_account(account)
        try:
            stream.finish(wire.request_end(completion))
        except RequestError as error:
            stream.fail(error)

    def _return(self, pending: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        if not pending.stream.closed:
            self._give_back(pending, error, was_taken=was_taken)

    def _release(self, stream: RequestStream) -> PendingRequest:
        handle = stream.handle
        del self._streams[handle]
        self.num_waiting_tokens -= self._waiting_tokens.pop(handle, 0)
        self._outbox.forget(handle)
        self._free_handles.append(handle)
        return self._requests.pop(handle)

    def check_integrity(self) -> None:
        """Asserts the invariants; used by tests."""
        assert not set(self._free_handles) & set(self._streams), "a handle is free and in use"
        assert len(set(self._free_handles)) == len(self._free_handles), "a handle is free twice"
        assert self._requests.keys() == self._streams.keys() >= self._waiting_tokens.keys()
        assert self._lost or self.num_waiting_tokens == sum(self._waiting_tokens.values())
        used = self._free_handles + list(self._streams)
        assert sorted(used) == list(range(1, len(used) + 1)) or self._lost, "a handle has been lost"
