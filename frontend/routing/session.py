"""One Attach stream without its socket: assigns handles, collects commands, and distributes events.

A session ends with its stream and is never reused, so that state of a dead session cannot affect the next one. All code
here is synchronous and runs on the event loop's thread.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable, ModelNotFound, QueueFull, RequestError
from frontend.routing import wire
from frontend.routing.command_outbox import CommandOutbox
from frontend.routing.forecast import EngineForecast
from frontend.routing.pending import PendingRequest
from frontend.routing.placement import EngineLoad
from frontend.routing.stream import CancelReason

logger = logging.getLogger(__name__)


class OnRejected(Protocol):
    """Takes back a request that this engine cannot serve now, but another one may."""

    def __call__(self, request: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        """`error`: given to the client if no engine takes it. `was_taken`: the engine took it, then dropped it."""


class EngineSession:
    """The requests of one Attach stream.

    Invariants: a handle is in use from `submit` until the engine's Completion or Rejection, even if the
    request was cancelled; every stream ends with exactly one of finish, fail or close.

    Args:
        vocab_size: token ids at or above it are a fault of the engine.
        block_size: tokens per block of the engine's KV cache.
        step_window: maximum number of unacknowledged StepResults.
        wake: called when there are commands to send.
        on_rejected: called for requests that the engine rejects because it is full or lacks their adapter, or drops
            because it stops.

    Attributes:
        heard_at_s: time.monotonic() when the engine last sent computed results, for any request.
    """

    def __init__(
        self, *, vocab_size: int, block_size: int, step_window: int, wake: Callable[[], None], on_rejected: OnRejected
    ) -> None:
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._other_load = EngineLoad()  # of other frontends
        self._reported = pb.LoadStats()
        self._min_step_s = 0.0  # a step of one row and one token; 0: the engine has no step-time model
        self._due: dict[int, float] = {}  # time.monotonic() of first tokens with a target, of those in _waiting_tokens
        self._num_other_on_time = 0.0  # waiting tokens of requests with targets, of other frontends
        self._on_rejected = on_rejected
        self._outbox = CommandOutbox(step_window=step_window, wake=wake)
        self._open: dict[int, PendingRequest] = {}  # by handle
        self._waiting_tokens: dict[int, int] = {}  # prompt tokens of requests without a first token
        self._cached_tokens: dict[int, int] = {}  # of these, probably cached by the engine
        self._num_waiting_tokens = 0
        self._num_cached_tokens = 0
        self._free_handles: list[int] = []
        self._last_step_seq = 0
        self.heard_at_s = time.monotonic()
        self._end_error: RequestError | None = None

    @property
    def num_open(self) -> int:
        """Number of handles in use."""
        return len(self._open)

    @property
    def open_requests(self) -> list[PendingRequest]:
        """The open requests that were not cancelled."""
        return [request for request in self._open.values() if not request.stream.closed]

    def note_load(self, reported: pb.LoadStats) -> None:
        """Takes the engine's load report; the part that exceeds this frontend's requests belongs to other frontends."""
        self._other_load = EngineLoad(
            max(reported.num_running + reported.num_waiting - self.num_open, 0),
            max(reported.num_waiting_prefill_tokens - self._num_waiting_tokens, 0),
            reported.num_free_blocks * self._block_size,
            _prompt_tokens_per_s(reported.model_coefficients),
        )
        self._min_step_s = sum(reported.model_coefficients[:3])
        if reported.prompt_tokens_per_second:
            self._reported = reported
            own = sum(self._waiting_tokens[handle] for handle in self._due)
            self._num_other_on_time = max(reported.lane_tokens[0] - own, 0) if reported.lane_tokens else 0.0

    def forecast(self, due_s: float) -> EngineForecast:
        """Returns what predicts the first token of a request that would come now.

        Own requests with later first tokens are behind it; those of other frontends are taken to be ahead.

        Args:
            due_s: time.monotonic() of its first token.
        """
        ahead = sum(self._waiting_tokens[handle] for handle, other_s in self._due.items() if other_s <= due_s)
        reported = self._reported
        is_idle = not self._open and not self._other_load.num_requests
        return EngineForecast(
            reported.prompt_tokens_per_second,
            ahead + self._num_other_on_time,
            self._min_step_s if is_idle else reported.step_us / 1e6,  # the last step may have been a stall
            self._min_step_s,
        )

    def load(self) -> EngineLoad:
        """Returns the load: this frontend's current requests, and those of others as of the engine's last report."""
        others = self._other_load
        num_cached_tokens = self._num_cached_tokens if others.prompt_tokens_per_s else 0  # of use with a rate only
        return EngineLoad(
            others.num_requests + self.num_open,
            others.num_waiting_tokens + self._num_waiting_tokens - num_cached_tokens,
            others.num_free_tokens,
            others.prompt_tokens_per_s,
        )

    def submit(self, request: PendingRequest, num_cached_tokens: int = 0) -> None:
        """Queues a request for sending, under a free handle.

        Args:
            request: what to send.
            num_cached_tokens: tokens of its prompt that the engine has probably cached; they are no load.

        Raises:
            RequestError: the stream has ended; the error that `end` was called with.
        """
        if self._end_error is not None:
            raise self._end_error
        handle = self._free_handles.pop() if self._free_handles else len(self._open) + 1
        submission = request.attach(handle, grant=partial(self._grant, handle), cancel=partial(self._cancel, handle))
        self._open[handle] = request
        self._waiting_tokens[handle] = request.num_prompt_tokens + request.stream.num_tokens
        self._num_waiting_tokens += self._waiting_tokens[handle]
        if num_cached_tokens:
            self._cached_tokens[handle] = num_cached_tokens
            self._num_cached_tokens += num_cached_tokens
        if request.first_token_due_s is not None:
            self._due[handle] = request.first_token_due_s
        self._outbox.submit(submission)

    def _grant(self, handle: int, num_tokens: int) -> None:
        if handle in self._open:
            self._outbox.grant(handle, num_tokens)

    def _cancel(self, handle: int, reason: CancelReason) -> None:
        """Cancels a request; its id stays in use until the engine confirms."""
        if handle in self._open:
            self._outbox.cancel(handle, reason)

    def acknowledge_at_once(self) -> None:
        """Acknowledges each step at once, because a draining engine waits briefly for the last acknowledgement."""
        self._outbox.acknowledge_at_once()

    def take_commands(self) -> Iterator[pb.AttachRequest]:
        """Takes all commands in sending order; encodes each one only when the iterator reaches it."""
        return self._outbox.take()

    def end(self, error: RequestError) -> tuple[list[PendingRequest], list[PendingRequest]]:
        """Ends the session with its stream; every later submission fails with `error`.

        Returns: the open requests that were not cancelled: those that the engine may have, and those never sent to it.
        """
        if self._end_error is None:
            self._end_error = error
        requests, self._open = self._open, {}
        self._waiting_tokens.clear()
        self._cached_tokens.clear()
        self._due.clear()
        unsent_handles = self._outbox.unsent_handles
        sent: list[PendingRequest] = []
        unsent: list[PendingRequest] = []
        for handle, request in requests.items():
            if not request.stream.closed:
                (unsent if handle in unsent_handles else sent).append(request)
        return sent, unsent

    def on_admission(self, result: pb.AdmissionResult) -> None:
        """Fails rejected requests, or returns them to the router."""
        self.heard_at_s = time.monotonic()
        for rejection in result.rejections:
            request = self._find(rejection.handle, rejection.epoch)
            if request is not None:
                self._release(rejection.handle)
                error = wire.rejection_error(rejection)
                if isinstance(error, EngineUnavailable | QueueFull | ModelNotFound):
                    self._return(request, error, was_taken=False)
                else:
                    request.stream.fail(error)

    def on_step(self, step: pb.StepResult) -> None:
        """Distributes one step to its requests and acknowledges it.

        Raises:
            ProtocolViolation: steps are missing, or the lengths of the columns differ.
        """
        if step.step_seq != self._last_step_seq + 1:
            raise wire.ProtocolViolation(f"step {step.step_seq} came after step {self._last_step_seq}")
        self._last_step_seq = step.step_seq
        self.heard_at_s = time.monotonic()
        for first in step.first_tokens:
            request = self._find(first.handle, first.epoch)
            if request is not None:
                self._forget_prompt(first.handle)
                request.stream.note_cached_tokens(first.num_cached_tokens)
        for account in step.time_accounts:
            request = self._find(account.handle, account.epoch)
            if request is not None:
                request.stream.clock.report(wire.engine_time(account))
        for prompt in step.prompt_logprobs:
            self._add_prompt_logprobs(step.step_seq, prompt)
        if step.handles:
            self._push_rows(step)
        for completion in step.completions:
            request = self._find(completion.handle, completion.epoch)
            if request is not None:
                self._release(completion.handle)
                self._complete(request, completion)
        self._outbox.acknowledge(step.step_seq)

    def _find(self, handle: int, epoch: int) -> PendingRequest | None:
        """Returns the request of an event; None if the event is late, for an ended request or an earlier epoch."""
        request = self._open.get(handle)
        return request if request is not None and request.epoch == epoch else None

    def _add_prompt_logprobs(self, step_seq: int, prompt: pb.PromptLogprobs) -> None:
        request = self._find(prompt.handle, prompt.epoch)
        if request is None or request.stream.closed:
            return
        try:
            if request.stream.prompt_logprobs is None:
                raise ValueError("prompt log-probabilities that were not requested")
            request.stream.prompt_logprobs.add(prompt.start_index, wire.prompt_columns(prompt))
        except ValueError as error:
            raise wire.ProtocolViolation(f"step {step_seq}, handle {prompt.handle}: {error}") from error

    def _push_rows(self, step: pb.StepResult) -> None:
        max_id = max(step.token_ids, default=0)
        for handle, epoch, start, token_ids, logprobs in wire.rows(step):
            request = self._find(handle, epoch)
            if request is None or request.stream.closed:
                continue
            try:
                if max_id >= self._vocab_size and max(token_ids, default=0) >= self._vocab_size:
                    raise EngineFault(f"the engine sent token {max(token_ids)}, the vocabulary has {self._vocab_size}")
                request.stream.push(start, token_ids, logprobs)
            except EngineFault as fault:
                logger.error("handle %d: %s", handle, fault.message)
                request.stream.fail(fault)
                self._cancel(handle, CancelReason.CLIENT)

    def _complete(self, request: PendingRequest, completion: pb.Completion) -> None:
        stream, account = request.stream, wire.engine_account(completion)
        if completion.reason == pb.COMPLETION_REASON_CANCELLED and not stream.closed:  # by the engine
            stream.clock.report(account)
            self._return(request, wire.completion_error(completion), was_taken=True)
            return
        stream.report_end(account)
        try:
            stream.finish(wire.request_end(completion))
        except RequestError as error:
            stream.fail(error)

    def _return(self, request: PendingRequest, error: RequestError, *, was_taken: bool) -> None:
        if not request.stream.closed:
            self._on_rejected(request, error, was_taken=was_taken)

    def _release(self, handle: int) -> None:
        del self._open[handle]
        self._forget_prompt(handle)
        self._outbox.forget(handle)
        self._free_handles.append(handle)

    def _forget_prompt(self, handle: int) -> None:
        """Its prompt is no load any more: it has been computed, or the request has ended."""
        self._num_waiting_tokens -= self._waiting_tokens.pop(handle, 0)
        self._num_cached_tokens -= self._cached_tokens.pop(handle, 0)
        self._due.pop(handle, None)

    def check_integrity(self) -> None:
        """Asserts the invariants; used by tests."""
        assert not set(self._free_handles) & set(self._open), "a handle is free and in use"
        assert len(set(self._free_handles)) == len(self._free_handles), "a handle is free twice"
        assert self._open.keys() >= self._waiting_tokens.keys() >= self._due.keys()
        assert self._waiting_tokens.keys() >= self._cached_tokens.keys()
        assert self._end_error or self._num_waiting_tokens == sum(self._waiting_tokens.values())
        assert self._end_error or self._num_cached_tokens == sum(self._cached_tokens.values())
        used = self._free_handles + list(self._open)
        assert sorted(used) == list(range(1, len(used) + 1)) or self._end_error, "a handle has been lost"


def _prompt_tokens_per_s(coefficients: Sequence[float]) -> float:
    """Returns the rate of the device by the engine's model of step times, `LoadStats.model_coefficients`; 0: none."""
    token_s = coefficients[1] if len(coefficients) > 1 else 0.0
    return 1.0 / token_s if token_s > 0 else 0.0
