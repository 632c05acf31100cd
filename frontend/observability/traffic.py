"""What passes through this process, for the line of throughput that people look for in a log."""

import asyncio
import logging
import statistics
import time
from dataclasses import dataclass, field

_log = logging.getLogger("frontend.throughput")


@dataclass(slots=True)
class Traffic:
    """Counts of requests; written by `request_watch.py`.

    Attributes:
        num_running: accepted requests that have their first token and have not ended.
        num_waiting: accepted requests without their first token.
        num_finished: accepted requests that have ended, however.
        num_rejected: requests that were turned away.
        num_prompt_tokens, num_output_tokens: of requests that have their first token; as they are sent.
        first_token_s: how long requests had to wait for it.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    def start(self, num_prompt_tokens: int, first_token_s: float) -> None:
        """A request that waited has its first token."""
        self.num_waiting -= 1
        self.num_running += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.first_token_s.append(first_token_s)

    def end(self, *, has_started: bool, is_rejected: bool) -> None:
        """An accepted request has ended."""
        if has_started:
            self.num_running -= 1
        else:
            self.num_waiting -= 1
        if is_rejected:
            self.num_rejected += 1
        else:
            self.num_finished += 1

    def log(self, elapsed_s: float) -> None:
        """Logs what has passed since the last time, if anything has, and counts anew. The words are the engine's."""
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
    """Logs for ever."""
    logged_at_s = time.monotonic()
    while True:
        await asyncio.sleep(interval_s)
        now_s = time.monotonic()
        traffic.log(now_s - logged_at_s)
        logged_at_s = now_s
