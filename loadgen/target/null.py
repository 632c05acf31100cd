"""A target without a server: answers at once, or at given times, inside the load generator's own event loop.

It measures the load generator itself: `null:` answers as fast as it is called. `null:?ttft_ms=50&itl_ms=10&tokens=2`
sets times; `busy_ms=20` blocks the event loop for 20 ms at each request, to test the self-check.
"""

import asyncio
import time
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from loadgen.errors import TargetError
from loadgen.target.base import PlannedRequest, Sink, TargetFacts, TargetSpec

_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class NullPace:
    """Times of the answers, from the query of the URL.

    Attributes:
        ttft_ms: time to the first message.
        itl_ms: time from one message to the next.
        busy_ms: time that each request blocks the event loop at its start.
        tokens: tokens per message.
    """

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    busy_ms: float = 0.0
    tokens: int = 1

    @staticmethod
    def of(url: str) -> "NullPace":
        """Parses the query of a URL. Raises: TargetError: an unknown name or a value out of range."""
        known = {entry.name: int if entry.name == "tokens" else float for entry in fields(NullPace)}
        given: dict[str, Any] = {}
        for name, text in parse_qsl(urlsplit(url).query, keep_blank_values=True):
            try:
                given[name] = known[name](text)
                if given[name] < (name == "tokens"):
                    raise ValueError
            except (KeyError, ValueError):
                raise TargetError(f"{url}: {name}={text} is not one of {', '.join(known)} and a number") from None
        return NullPace(**given)


class NullTarget:
    """Answers without a server. Args: spec: its url has the times, see NullPace."""

    def __init__(self, spec: TargetSpec) -> None:
        self._pace = NullPace.of(spec.url)
        self._model = spec.model or "null"

    async def probe(self) -> TargetFacts:
        """See Target."""
        return TargetFacts(self._model, vocab_size=_VOCAB_SIZE)

    async def count_tokens(self, text: str) -> int:
        """Returns the number of words."""
        return len(text.split())

    def prepare(self, request: PlannedRequest) -> tuple[int, int]:
        """Returns the numbers of prompt and output tokens."""
        if request.token_ids is not None:
            return len(request.token_ids), request.num_output_tokens
        return len((request.text or "").split()), request.num_output_tokens

    async def send(self, prepared: tuple[int, int], sink: Sink, retry_ticket: str = "") -> None:  # noqa: ARG002
        """See Target."""
        num_input_tokens, num_output_tokens = prepared
        pace = self._pace
        sink.sent()
        end_of_work_s = time.monotonic() + pace.busy_ms / 1e3
        while time.monotonic() < end_of_work_s:
            pass
        await asyncio.sleep(pace.ttft_ms / 1e3)
        sink.started(num_input_tokens, 0)
        left = num_output_tokens
        while left > 0:
            if left < num_output_tokens:
                await asyncio.sleep(pace.itl_ms / 1e3)
            sink.tokens(min(pace.tokens, left))
            left -= pace.tokens
        sink.finished(num_output_tokens)

    async def close(self) -> None:
        """Does nothing: there are no connections."""
