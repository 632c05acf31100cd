"""Tokens of one request on their way from the engine's stream to the coroutine that serves its client.

The buffer is bounded by credits: the engine may generate `window` tokens ahead of what the client has taken and is then
parked with its KV cache kept. Credit goes back when the reader comes for more, which it does only after the transport
has taken what it got before. A stream outlives the engine: when that goes away, it waits for the next one and goes on
where it was. Knows neither text nor protos; one event loop, one reader.
"""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from chairlift.service.end_reason import EndReason
from frontend.errors import EngineFault, RequestError
from frontend.routing.clock import EngineTimes
from frontend.routing.logprobs import LogprobBatch, PromptLogprobs
from frontend.types import EngineAccount, EngineTime


class CancelReason(Enum):
    """Why the frontend stops a request."""

    CLIENT = auto()
    STOP_TEXT = auto()
    DEADLINE = auto()
    STALLED = auto()


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The engine's account of a request that ended well."""

    reason: EndReason
    stop_token_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What was buffered when the reader came: tokens, the end, or both.

    Attributes:
        first_index: index in the output of the first token.
        logprobs: of every token, if the request asked for them.
        end: set once, on the last batch.
    """

    first_index: int
    token_ids: list[int]
    logprobs: LogprobBatch | None
    end: RequestEnd | None

    def one_by_one(self) -> Iterator["TokenBatch"]:
        """The same tokens in batches of one, without log-probabilities; the end comes with the last."""
        last = len(self.token_ids) - 1
        for position, token_id in enumerate(self.token_ids):
            end = self.end if position == last else None
            yield TokenBatch(self.first_index + position, [token_id], None, end)


class StreamOwner(Protocol):
    """Who has the stream now, an engine's session as a rule, as far as the stream needs it."""

    def grant(self, handle: int, num_tokens: int) -> None:
        """Lets the engine generate more tokens for a request."""

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Stops a request; without effect once the engine has ended it."""


class RequestStream:
    """The output of one request.

    Invariant: every index of the output is handed to the reader exactly once, in order, until the end or a failure.

    Args:
        window: tokens the engine may be ahead of the reader.
        max_tokens: no credit is granted beyond it.
        prompt_logprobs: gathers those of the prompt, which come before the first token; None: none were asked for.
        coalesce: whether `take` takes all that is there, or one token at a time.

    Attributes:
        handle: the request's name on the engine's stream; 0: no engine has it.
        epoch: engines that have taken it before; rows of another epoch belong to an earlier submission.
        output_ids: all tokens that have arrived.
        num_cached_tokens: prompt tokens whose KV cache was reused; known from the first token on.
        heard_at_s: time.monotonic() when an engine that is lost last sent what it had done; its session sets it.
        on_first_token: called once, when the first token arrives.
        on_account: called once, with the account of all engines; also after `close`, but not if the engine goes away.
    """

    def __init__(
        self, *, window: int, max_tokens: int, prompt_logprobs: PromptLogprobs | None = None, coalesce: bool = True
    ) -> None:
        self.handle = 0
        self.epoch = 0
        self.output_ids = array("I")
        self.prompt_logprobs = prompt_logprobs
        self.num_cached_tokens = 0
        self.first_token_at_s: float | None = None  # time.monotonic()
        self.heard_at_s: float | None = None
        self._times = EngineTimes()
        self._owed_since_s = 0.0  # the engine has had credit without a break; time.monotonic()
        self._client_wait_s = 0.0
        self._engine_idle_since_s: float | None = None  # without credit, or done; time.monotonic()
        self._reader_busy_since_s: float | None = None  # with what it has taken
        self.on_first_token: Callable[[], None] = _do_nothing
        self.on_account: Callable[[EngineAccount], None] = _ignore
        self._window = window
        self._coalesce = coalesce
        self._num_granted = window
        self._max_tokens = max_tokens
        self._owner: StreamOwner = _NOBODY
        self._token_ids: list[int] = []
        self._logprobs: LogprobBatch | None = None
        self._end: RequestEnd | None = None
        self._failure: RequestError | None = None
        self._closed = False
        self._num_handed_out = 0  # tokens of the last batch: taken by the reader, not yet known to be written
        self._num_ungranted = 0  # tokens written whose credit has not gone back
        self._waiter: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken from the engine: it has ended, failed, or was closed."""
        return self._closed

    @property
    def num_tokens(self) -> int:
        """Tokens that have arrived."""
        return len(self.output_ids)

    @property
    def is_parked(self) -> bool:
        """Whether the engine has nothing to do for it until the reader comes."""
        return self._engine_idle_since_s is not None

    # The engine's side.

    def bind(self, handle: int, owner: StreamOwner) -> int:
        """An engine gets it, under this handle; `owner` gets the grants and the cancellation.

        Returns: tokens it may generate: at least one, because 0 would say any number.
        """
        self.handle, self._owner = handle, owner
        self._owed_since_s = time.monotonic()
        self._times.submit(self._owed_since_s)
        self._num_granted = max(self._num_granted, self.num_tokens + 1)
        return self._num_granted - self.num_tokens

    def leave(self, owner: StreamOwner, *, was_taken: bool) -> None:
        """The engine that had it does not have it any more, or has not taken it, or there was none; until the next one
        has it, it is `owner`'s.
        """
        now_s = time.monotonic()
        self.handle, self._owner = 0, owner
        if was_taken:
            silent_since_s = now_s
            if self.heard_at_s is not None and not self.is_parked:
                silent_since_s = max(self.heard_at_s, self._owed_since_s)
            self._times.lose(now_s, silent_since_s=silent_since_s, parked_s=self.client_wait_s(now_s))
            self._client_wait_s, self._engine_idle_since_s, self.heard_at_s = 0.0, None, None
            self.epoch += 1
        else:
            self._times.refuse(now_s)

    def push(self, start_index: int, token_ids: list[int], logprobs: LogprobBatch | None) -> None:
        """Takes new tokens; what is known already is dropped.

        Raises:
            EngineFault: tokens are missing between those known and these, or log-probabilities of the prompt.
        """
        if self._closed:
            return
        num_tokens = len(self.output_ids)
        num_known = num_tokens - start_index
        if num_known < 0:
            raise EngineFault(f"the engine sent output token {start_index} when {num_tokens} was next")
        if num_known:
            token_ids = token_ids[num_known:]
            logprobs = logprobs.without_first(num_known) if logprobs else None
        if not token_ids:
            return
        if self.first_token_at_s is None:
            if self.prompt_logprobs is not None and self.prompt_logprobs.num_missing:
                num_missing = self.prompt_logprobs.num_missing
                raise EngineFault(
                    f"the engine sent a token, with {num_missing} log-probabilities of the prompt missing"
                )
            self.first_token_at_s = time.monotonic()
            self.on_first_token()
        self.output_ids.extend(token_ids)
        if self._num_granted <= num_tokens + len(token_ids) < self._max_tokens:
            self._engine_idle_since_s = time.monotonic()
        self._token_ids += token_ids
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = logprobs
            else:
                self._logprobs.extend(logprobs)
        self._wake()

    def tell_time(self, engine_time: EngineTime) -> None:
        """Takes the engine's account so far."""
        self._times.tell(engine_time)
        self._client_wait_s, self._engine_idle_since_s = 0.0, None

    def tell_account(self, account: EngineAccount) -> None:
        """Takes the engine's account of all of its time; it has ended there."""
        self.tell_time(account)
        self.on_account(self._times.account(account))

    def finish(self, end: RequestEnd) -> None:
        """Takes the end.

        Raises:
            EngineFault: the engine counts other tokens than have arrived.
        """
        if self._closed:
            return
        if end.num_output_tokens != self.num_tokens:
            raise EngineFault(f"the engine counts {end.num_output_tokens} output tokens, {self.num_tokens} arrived")
        self._end = end
        self._closed = True
        self._engine_idle_since_s = time.monotonic()
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Ends the stream with an error, which the reader gets at once, before anything still buffered."""
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
        """Waits until something is there and takes it; returns the credit of the batch before.

        Raises:
            RequestError: what `fail` was called with.
        """
        if self._engine_idle_since_s is not None:
            self.client_wait_s(time.monotonic())
        self._reader_busy_since_s = None
        self._return_credit()
        while not (self._token_ids or self._closed):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._reader_busy_since_s = time.monotonic()
        if self._failure is not None:
            raise self._failure
        first_index = self.num_tokens - len(self._token_ids)
        if not self._coalesce and len(self._token_ids) > 1:
            return self._take_one(first_index)
        token_ids, self._token_ids = self._token_ids, []
        logprobs, self._logprobs = self._logprobs, None
        self._num_handed_out = len(token_ids)
        return TokenBatch(first_index, token_ids, logprobs, self._end)

    def _take_one(self, first_index: int) -> TokenBatch:
        """Takes one token of several."""
        token_ids, self._token_ids = self._token_ids[:1], self._token_ids[1:]
        logprobs = self._logprobs
        if logprobs is not None:
            logprobs, self._logprobs = logprobs.first(1), logprobs.without_first(1)
        self._num_handed_out = 1
        return TokenBatch(first_index, token_ids, logprobs, None)

    def close(self, reason: CancelReason) -> None:
        """Wants no more: cancels the request in the engine unless it has ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._owner.cancel(self.handle, reason)

    def engine_time(self, now_s: float) -> EngineTime | None:
        """The account of all engines so far; None before the first token."""
        return self._times.so_far(now_s)

    def client_wait_s(self, now_s: float) -> float:
        """How long there was nothing to do but to wait for the reader, as far as the engine's account does not tell."""
        if self._engine_idle_since_s is not None and self._reader_busy_since_s is not None:
            self._client_wait_s += max(now_s - max(self._engine_idle_since_s, self._reader_busy_since_s), 0.0)
            self._reader_busy_since_s = now_s
        return self._client_wait_s

    def _return_credit(self) -> None:
        self._num_ungranted += self._num_handed_out
        self._num_handed_out = 0
        # Half a window at a time: a grant costs a message, and the engine still has the other half to work with.
        if self._num_ungranted * 2 < self._window or self._closed or self._num_granted >= self._max_tokens:
            return
        self._owner.grant(self.handle, self._num_ungranted)
        self._num_granted += self._num_ungranted
        if self._engine_idle_since_s is not None:
            self._engine_idle_since_s, self._owed_since_s = None, time.monotonic()
        self._num_ungranted = 0


class _Nobody:
    """Has a stream that no engine has had yet."""

    def grant(self, handle: int, num_tokens: int) -> None:
        """Is part of what the engine gets with the request."""

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """There is nothing to stop."""


_NOBODY = _Nobody()


def _do_nothing() -> None:
    pass


def _ignore(account: EngineAccount) -> None:
    pass
