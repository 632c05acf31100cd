"""How a workload is run; checked when created."""

from dataclasses import dataclass
from typing import Literal

from loadgen.errors import OptionError
from loadgen.prompts.token_ids import Vocabulary
from loadgen.service_mix import ServiceMix
from loadgen.target.probe import PROBE_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a workload is run.

    Attributes:
        workers: client processes; None takes as many as the load needs and the host has cores for.
        concurrency: closed loop: this many requests are always in flight and arrivals are ignored; None is open loop.
        max_concurrency: open loop: most requests in flight, shared out evenly among the workers; None is no limit.
        overflow: what a request does that `max_concurrency` holds back: wait its turn, or be dropped.
        salt: of the prompts; "" draws a fresh one.
        seed: of what is drawn here (which calls to cancel).
        cancel_rate: share of the calls that are cancelled on purpose, after some tokens, 0 to 1.
        drain_timeout_s: how long answers may take after the last request was due; then they are aborted. In a closed
            loop, the run also ends if no answer ends for this long.
        vocab_size: ids prompts are made of; None is what the server says.
        vocabulary: all of these ids, whatever the server says; None is made of its special ids and `vocab_size`.
        probe_timeout_s: for a server to say what it serves.
        targets: latency targets of the requests, drawn with `seed`; None: they have none.
        max_retries: retries of a request that is refused for its targets, each at the time that the server names.

    Raises: OptionError: a value out of range, or options that contradict each other.
    """

    workers: int | None = None
    concurrency: int | None = None
    max_concurrency: int | None = None
    overflow: Literal["queue", "drop"] = "queue"
    salt: str = ""
    seed: int = 0
    cancel_rate: float = 0.0
    drain_timeout_s: float = 600.0
    vocab_size: int | None = None
    vocabulary: Vocabulary | None = None
    probe_timeout_s: float = PROBE_TIMEOUT_S
    targets: ServiceMix | None = None
    max_retries: int = 0

    def __post_init__(self) -> None:
        for name in ("workers", "concurrency", "max_concurrency"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"--{name.replace('_', '-')} is {value}, must be at least 1")
        if self.concurrency is not None and self.max_concurrency is not None:
            raise OptionError(
                f"--concurrency {self.concurrency} makes a closed loop, --max-concurrency {self.max_concurrency} "
                "limits an open one; give one of them"
            )
        if self.overflow == "drop" and self.max_concurrency is None:
            raise OptionError("--overflow drop needs --max-concurrency: without a limit nothing is dropped")
        if not 0 <= self.cancel_rate <= 1:
            raise OptionError(f"--cancel-rate is {self.cancel_rate:g}, must be 0 to 1")
        if self.max_retries < 0:
            raise OptionError(f"--max-retries is {self.max_retries}, must be at least 0")
        if not self.drain_timeout_s > 0:
            raise OptionError(f"--drain-timeout is {self.drain_timeout_s:g} s, must be above 0")
        if not self.probe_timeout_s > 0:
            raise OptionError(f"probe_timeout_s is {self.probe_timeout_s:g}, must be above 0")
