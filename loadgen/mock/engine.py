"""What both mock servers share: answers at their times, and a record of what was seen."""

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from loadgen.mock.behaviour import NEVER, MockBehaviour, MockMessage, Stall
from loadgen.target.probe import NUM_PROBE_TOKENS

_TIMER_BIAS_S = 0.0005  # asyncio's timers fire 0 to 1 ms late: epoll counts in milliseconds, rounded up


class MockFailureError(Exception):
    """The request fails, as was asked for."""


@dataclass(slots=True)
class SeenRequest:
    """A request as the server saw it; times in nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        prompt_sha256: of the ids as little-endian uint32, or of the text.
        num_input_tokens, num_asked: of the prompt, and asked for.
        arrived_ns: when it came.
        first_ns, ended_ns: when its first message left, and when it was over.
        num_sent: tokens that left.
        outcome: "open", "done", "failed", or "cancelled" by the client.
    """

    prompt_sha256: str
    num_input_tokens: int
    num_asked: int
    arrived_ns: int
    first_ns: int = NEVER
    ended_ns: int = NEVER
    num_sent: int = 0
    outcome: str = "open"


@dataclass(slots=True)
class MockRecord:
    """What a server saw.

    Attributes:
        requests: in order of arrival, probes included.
        num_open, max_open: answers in flight now, and at most.
        stall: when the server stood still; None before the first request, or if it never does.
    """

    requests: list[SeenRequest] = field(default_factory=list)
    num_open: int = 0
    max_open: int = 0
    stall: Stall | None = None

    def answered(self) -> list[SeenRequest]:
        """Without the probes."""
        return [request for request in self.requests if request.num_asked > NUM_PROBE_TOKENS]


class MockEngine:
    """Answers requests as its behaviour says; used by one event loop.

    Attributes:
        behaviour: see there.
        record: what was seen so far.
    """

    def __init__(self, behaviour: MockBehaviour) -> None:
        self.behaviour = behaviour
        self.record = MockRecord()

    def num_cached(self, num_input_tokens: int) -> int:
        """Tokens of a prompt that are said to have been cached."""
        return int(num_input_tokens * self.behaviour.cached_share)

    async def answer(self, prompt: bytes, num_input_tokens: int, num_asked: int) -> AsyncGenerator[MockMessage, None]:
        """The messages of one answer, each when it is due. Close it (`contextlib.aclosing`) when the client is gone.

        Raises: MockFailureError: where the answer is to fail.
        """
        now_ns = time.monotonic_ns()
        record = self.record
        answer = self.behaviour.answer(len(record.requests), num_asked)
        seen = SeenRequest(hashlib.sha256(prompt).hexdigest(), num_input_tokens, num_asked, now_ns)
        record.requests.append(seen)
        if record.stall is None and self.behaviour.stall_s and num_asked > NUM_PROBE_TOKENS:
            start_ns = now_ns + round(self.behaviour.stall_at_s * 1e9)
            record.stall = Stall(start_ns, start_ns + round(self.behaviour.stall_s * 1e9))
        record.num_open += 1
        record.max_open = max(record.max_open, record.num_open)
        seen.outcome = "cancelled"  # unless it comes to its end
        try:
            for message in answer.messages:
                await self._until(now_ns, message.due_s)
                if not seen.num_sent:
                    seen.first_ns = time.monotonic_ns()
                seen.num_sent += message.num_tokens
                yield message
            seen.outcome = "failed" if answer.fails else "done"
            if answer.fails:
                raise MockFailureError(f"mock failure after {len(answer.messages)} messages")
        finally:
            record.num_open -= 1
            seen.ended_ns = time.monotonic_ns()

    async def _until(self, arrived_ns: int, due_s: float) -> None:
        while True:
            stall = self.record.stall
            leaves_ns = stall.leaves_ns(arrived_ns, due_s) if stall else arrived_ns + round(due_s * 1e9)
            left_s = (leaves_ns - time.monotonic_ns()) / 1e9
            if left_s <= _TIMER_BIAS_S:
                return
            await asyncio.sleep(left_s - _TIMER_BIAS_S)


class MockServer(ABC):
    """Serves on one address until it is closed.

    Args:
        behaviour: how it answers.
        host, port: to listen on; port 0 takes a free one.
        shares_port: other processes may listen on the same port.
        api_key: bearer token that HTTP requests need; "" for none.

    Attributes:
        url: of the server, once it has started.
    """

    def __init__(
        self,
        behaviour: MockBehaviour,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        shares_port: bool = False,
        api_key: str = "",
    ) -> None:
        self._engine = MockEngine(behaviour)
        self._host, self._port = host, port
        self._shares_port = shares_port
        self._api_key = api_key
        self.url = ""

    @property
    def record(self) -> MockRecord:
        """What it saw."""
        return self._engine.record

    @abstractmethod
    async def start(self) -> None:
        """Listens. Raises: OSError: the port is taken."""

    @abstractmethod
    async def close(self) -> None:
        """Stops listening and aborts what is in flight."""
