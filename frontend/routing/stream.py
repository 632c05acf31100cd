"""Output tokens of one request, buffered between the engine and the coroutine that serves the client.

Credit bounds the buffer (backpressure): the engine may generate `window` tokens ahead of the reader and then pauses,
keeping its KV cache. Credit is returned when the reader asks for more, which it does after the transport has accepted
the previous tokens. A stream outlives an engine: the next engine continues where the lost one stopped. Knows neither
text nor protos; one event loop, one reader.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

from chairlift.service.end_reason import EndReason
from frontend.errors import EngineFault, RequestError
from frontend.routing.clock import RequestClock
from frontend.routing.logprobs import LogprobBatch, PromptLogprobs
from frontend.types import EngineAccount


class CancelReason(Enum):
    """Why the frontend cancels a request."""

    CLIENT = auto()
    STOP_TEXT = auto()
    DEADLINE = auto()
    STALLED = auto()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The engine's final counts of a request that completed."""

    reason: EndReason
    stop_token_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The buffered tokens, the end, or both.

    Attributes:
        first_index: index of the first token in the output.
        logprobs: log-probabilities of every token, if requested.
        end: set on the last batch.
    """

    first_index: int
    token_ids: list[int]
    logprobs: LogprobBatch | None
    end: RequestEnd | None

    def one_by_one(self) -> Iterator["TokenBatch"]:
        """Yields the same tokens in batches of one, without log-probabilities; the end comes with the last."""
        last = len(self.token_ids) - 1
        for position, token_id in enumerate(self.token_ids):
            end = self.end if position == last else None
            yield TokenBatch(self.first_index + position, [token_id], None, end)


class RequestStream:
    """The output of one request.

    Invariant: the reader gets every token exactly once, in order, until the end or a failure.

    Args:
        window: maximum tokens that the engine may be ahead of the reader.
        max_tokens: limit of the credit.
        prompt_logprobs: collects the prompt's log-probabilities, which arrive before the first token; None: not
            requested.
        coalesce: whether `take` returns all buffered tokens, or one at a time.
        on_first_token: called once, when the first token arrives.
        on_account: called once, with the accounting over all engines; also after `close`, but not if the engine is
            lost.

    Attributes:
        output_ids: all tokens so far.
        num_cached_tokens: prompt tokens whose KV cache was reused; known with the first token.
        clock: the request's time accounting.
    """

    def __init__(
        self,
        *,
        window: int,
        max_tokens: int,
        prompt_logprobs: PromptLogprobs | None = None,
        coalesce: bool,
        on_first_token: Callable[[], None] | None,
        on_account: Callable[[EngineAccount], None] | None = None,
    ) -> None:
        self.output_ids = array("I")
        self.prompt_logprobs = prompt_logprobs
        self.num_cached_tokens = 0
        self.clock = RequestClock()
        self._on_first_token = on_first_token
        self._on_account = on_account
        self._window = window
        self._coalesce = coalesce
        self._max_tokens = max_tokens
        self._num_granted = window
        self._num_taken = 0
        self._logprobs: LogprobBatch | None = None  # of the buffered tokens
        self._end: RequestEnd | None = None
        self._failure: RequestError | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self._grant: Callable[[int], None] = lambda _: None
        self._cancel: Callable[[CancelReason], None] = lambda _: None

    @property
    def closed(self) -> bool:
        """Whether the stream has ended, failed or was closed, and accepts nothing more."""
        return self._closed

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return len(self.output_ids)

    # The engine's side.

    def attach(self, grant: Callable[[int], None], cancel: Callable[[CancelReason], None]) -> int:
        """Assigns the request to an engine, which gets credit and cancellation from now on.

        Returns: number of tokens that it may generate; at least 1, because 0 means unlimited on the wire.
        """
        self._grant, self._cancel = grant, cancel
        self.clock.submit(time.monotonic())
        self._num_granted = max(self._num_granted, self.num_tokens + 1)
        return self._num_granted - self.num_tokens

    def detach(
        self, cancel: Callable[[CancelReason], None], *, was_taken: bool, heard_at_s: float | None = None
    ) -> None:
        """Notes that no engine has the request; until one gets it, cancellation goes to `cancel`.

        Args:
            cancel: called when the reader closes the stream.
            was_taken: whether an engine had taken the request.
            heard_at_s: see `RequestClock.lose`.
        """
        # Credit that is returned meanwhile is passed to the next engine with the request.
        self._grant, self._cancel = lambda _: None, cancel
        if was_taken:
            self.clock.lose(time.monotonic(), heard_at_s=heard_at_s)
        else:
            self.clock.reject(time.monotonic())

    def note_cached_tokens(self, num_tokens: int) -> None:
        """Takes the number of prompt tokens whose KV cache the first engine that generates a token reused."""
        if not self.output_ids:
            self.num_cached_tokens = num_tokens

    def push(self, start_index: int, token_ids: list[int], logprobs: LogprobBatch | None) -> None:
        """Takes new tokens; drops those that are known.

        Raises:
            EngineFault: earlier tokens or log-probabilities of the prompt are missing.
        """
        if self._closed:
            return
        num_tokens = len(self.output_ids)
        num_known = num_tokens - start_index
        if num_known < 0:
            raise EngineFault(f"the engine sent output token {start_index} when {num_tokens} was next")
        if num_known:
            token_ids = token_ids[num_known:]
            logprobs = logprobs.cut(num_known) if logprobs else None
        if not token_ids:
            return
        if not num_tokens:
            if self.prompt_logprobs is not None and self.prompt_logprobs.num_missing:
                raise EngineFault(
                    f"the engine sent a token, with {self.prompt_logprobs.num_missing} log-probabilities of the prompt "
                    "missing"
                )
            self.clock.first_token_at_s = time.monotonic()
            if self._on_first_token is not None:
                self._on_first_token()
        self.output_ids.extend(token_ids)
        if self._num_granted <= self.num_tokens < self._max_tokens:
            self.clock.pause(time.monotonic())
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = logprobs
            else:
                self._logprobs.extend(logprobs)
        self._wake()

    def report_end(self, account: EngineAccount) -> None:
        """Takes the engine's final time report."""
        self.clock.report(account)
        if self._on_account is not None:
            self._on_account(self.clock.account(account))

    def finish(self, end: RequestEnd) -> None:
        """Completes the stream.

        Raises:
            EngineFault: the engine's token count differs from the number of tokens received.
        """
        if self._closed:
            return
        if end.num_output_tokens != self.num_tokens:
            raise EngineFault(f"the engine counts {end.num_output_tokens} output tokens, {self.num_tokens} arrived")
        self._end = end
        self._closed = True
        self.clock.pause(time.monotonic())
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Ends the stream with an error, which the reader gets at once, instead of buffered tokens."""
        if self._closed:
            return
        self._failure = error
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # The client's side.

    async def take(self) -> TokenBatch:
        """Waits for tokens and takes them; returns the credit of the previous batch to the engine.

        Raises:
            RequestError: the error that `fail` was called with.
        """
        self.clock.reader_came(time.monotonic())
        self._return_credit()
        while not (self.num_tokens > self._num_taken or self._closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self.clock.reader_left(time.monotonic())
        if self._failure is not None:
            raise self._failure
        first, end = self._num_taken, self._end
        last, logprobs = self.num_tokens, self._logprobs
        if not self._coalesce and last > first + 1:
            last, end = first + 1, None
        self._logprobs = None
        if logprobs is not None and last < self.num_tokens:
            logprobs, self._logprobs = logprobs.cut(0, 1), logprobs.cut(1)
        self._num_taken = last
        return TokenBatch(first, self.output_ids[first:last].tolist(), logprobs, end)

    def close(self, reason: CancelReason) -> None:
        """Cancels the request unless it has ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._cancel(reason)

    def _return_credit(self) -> None:
        """Grants credit for the tokens that the reader took, which have been sent by now."""
        num_due = self._num_taken + self._window - self._num_granted
        # Half a window at a time: each grant is a message, and the engine can use the other half meanwhile.
        if num_due * 2 < self._window or self._closed or self._num_granted >= self._max_tokens:
            return
        self._grant(num_due)
        self._num_granted += num_due
        self.clock.resume(time.monotonic())
