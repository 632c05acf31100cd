"""Results of one run of a workload: answers, and when every token of them arrived."""

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step of an engine.

    Attributes:
        ended_s: since the start of the run.
        seconds: total time: schedule, execute, update.
        execute_s: time of the runner.
        num_rows, num_tokens: of its batch.
        num_outputs: sampled tokens.
    """

    ended_s: float
    seconds: float
    execute_s: float
    num_rows: int
    num_tokens: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one workload. Requests are in the order given; times are seconds since the start of the run.

    Attributes:
        output_ids: per request.
        token_times_s: per request, arrival time of each token.
        arrivals_s: per request, its scheduled time.
        steps: steps that had rows, in order; empty where the engine is another process.
        wall_s: from the start to the end of the last answer.
    """

    output_ids: tuple[tuple[int, ...], ...]
    token_times_s: tuple[tuple[float, ...], ...]
    arrivals_s: tuple[float, ...]
    steps: tuple[Step, ...]
    wall_s: float

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens of all answers."""
        return sum(map(len, self.output_ids))

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of wall clock."""
        return self.num_output_tokens / self.wall_s

    def ttft_s(self, index: int) -> float:
        """Seconds from the arrival of a request to its first token."""
        return self.token_times_s[index][0] - self.arrivals_s[index]

    def gaps_s(self, index: int) -> tuple[float, ...]:
        """Inter-token latencies of a request, in seconds."""
        return tuple(b - a for a, b in itertools.pairwise(self.token_times_s[index]))
