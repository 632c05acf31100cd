"""Throughput of this process, logged periodically (`--log-stats-interval`)."""

import asyncio
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from chairlift.v1 import generation_service_pb2 as pb
from frontend.observability.outcome import Outcome
from frontend.observability.request_events import RequestEnd, RequestEvents, RequestProgress

MAX_FIRST_TOKENS = 4096
"""Times to first token that are kept for the median of a line: without lines (`--log-stats-interval 0`) nothing clears
them.
"""

_log = logging.getLogger("frontend.throughput")


@dataclass(slots=True)
class Traffic(RequestEvents):
    """Counts all requests of this process; logs and resets the counts.

    Attributes:
        num_running: accepted requests that have their first token and have not ended.
        num_waiting: accepted requests without their first token.
        num_finished: accepted requests that have ended, whether or not they succeeded.
        num_rejected: requests that were refused, or found the queue full.
        num_prompt_tokens: prompt tokens of requests that have their first token.
        num_output_tokens: output tokens sent.
        first_token_s: times to first token, at most the last MAX_FIRST_TOKENS.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_FIRST_TOKENS))

    def accepted(self, request: RequestProgress, prompt_text: Callable[[], str]) -> None:
        self.num_waiting += 1

    def started(self, request: RequestProgress, started: pb.Started) -> None:
        self.num_waiting -= 1
        self.num_running += 1
        self.num_prompt_tokens += started.num_prompt_tokens
        self.first_token_s.append(request.first_token_at_s - request.accepted_at_s)

    def tokens_sent(self, request: RequestProgress, answer_index: int, num_tokens: int, at_s: float) -> None:
        self.num_output_tokens += num_tokens

    def ended(self, request: RequestProgress, end: RequestEnd) -> None:
        if request.started is not None:
            self.num_running -= 1
        elif request.is_accepted:
            self.num_waiting -= 1
        if end.outcome in (None, Outcome.SHED):
            self.num_rejected += 1
        else:
            self.num_finished += 1

    def log(self, elapsed_s: float) -> None:
        """Logs the counts since the previous line, unless all are 0, and resets them. Same words as the engine's."""
        counted = self.num_finished + self.num_rejected + self.num_prompt_tokens + self.num_output_tokens
        if counted or self.num_running or self.num_waiting:
            fields = {
                "num_finished": self.num_finished,
                "num_rejected": self.num_rejected,
                "prompt_tokens_per_s": round(self.num_prompt_tokens / elapsed_s, 1),
                "generation_tokens_per_s": round(self.num_output_tokens / elapsed_s, 1),
                "num_running": self.num_running,
                "num_waiting": self.num_waiting,
                "ttft_p50_s": round(statistics.median(self.first_token_s), 4) if self.first_token_s else None,
            }
            _log.info(
                "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
                "Waiting: %d reqs, Finished: %d reqs, Rejected: %d reqs, TTFT p50: %s",
                fields["prompt_tokens_per_s"],
                fields["generation_tokens_per_s"],
                self.num_running,
                self.num_waiting,
                self.num_finished,
                self.num_rejected,
                f"{1000 * statistics.median(self.first_token_s):.0f} ms" if self.first_token_s else "-",
                extra=fields,
            )
        self.num_finished = self.num_rejected = self.num_prompt_tokens = self.num_output_tokens = 0
        self.first_token_s.clear()


async def log_traffic(traffic: Traffic, interval_s: float) -> None:
    """Logs a line every `interval_s` seconds until it is cancelled."""
    logged_at_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        traffic.log(now_s - logged_at_s)
        logged_at_s = now_s
