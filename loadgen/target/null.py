"""A server that is not there: answers at once, or at given times, inside the load generator's own event loop.

What it measures is the generator: `null:` answers as fast as it is called. `null:?ttft_ms=50&itl_ms=10&tokens=2` keeps
a pace; `busy_ms=20` holds up the event loop for so long with every request, to see that the self-check notices.
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
    """How the answers come: what follows the question mark of the URL.

    Attributes:
        ttft_ms: to the first message.
        itl_ms: from one message to the next.
        busy_ms: computing without a pause, at the start of every request.
        tokens: per message.
    """

    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    busy_ms: float = 0.0
    tokens: int = 1

    @staticmethod
    def of(url: str) -> "NullPace":
        """Raises: TargetError: an unknown name or a value out of range."""
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
    """See the module. Args: spec: its url says the pace."""

    def __init__(self, spec: TargetSpec) -> None:
        self._pace = NullPace.of(spec.url)
        self._model = spec.model or "null"

    async def probe(self) -> TargetFacts:
        """See Target."""
        return TargetFacts(self._model, vocab_size=_VOCAB_SIZE)

    async def count_tokens(self, text: str) -> int:
        """Words."""
        return len(text.split())

    def prepare(self, request: PlannedRequest) -> tuple[int, int]:
        """Tokens in and out."""
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
        """Nothing is open."""
