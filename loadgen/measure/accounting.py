"""Counts: requests by outcome, tokens against the plan, cached tokens against the ideal."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from loadgen.record import ABSENT, RunData, Status
from loadgen.trace.oracle import ideal_cached_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from loadgen.measure.samples import Samples

    Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by outcome; the sum is `offered`."""

    offered: int
    ok: int
    error: int
    refused: int
    timeout: int
    cancelled: int
    dropped: int
    in_flight: int
    unsent: int


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """Tokens of completed requests against the plan.

    Attributes:
        requested_output, achieved_output: tokens.
        output_off: sum of each answer's |achieved - requested|, over the requested; NaN without a completed request.
        planned_input, server_input: tokens, of those whose prompt the server counted.
        input_off: the same for prompts; NaN where the server counts none.
    """

    requested_output: int
    achieved_output: int
    output_off: float
    planned_input: int
    server_input: int
    input_off: float

    @property
    def achieved_share(self) -> float:
        """Achieved over requested output tokens; NaN where none were requested."""
        return self.achieved_output / self.requested_output if self.requested_output else float("nan")


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prompt tokens found in a prefix cache, of the requests for which the server reports them.

    Attributes:
        prompt_tokens: as planned.
        cached_tokens: as the server counted.
        ideal_tokens: what an infinite cache would have found that saw nothing but this workload, and the chat template
            and the like that the server adds to prompts of text.
    """

    prompt_tokens: int
    cached_tokens: int
    ideal_tokens: int

    @property
    def share(self) -> float:
        """cached_tokens / prompt_tokens."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def ideal_share(self) -> float:
        """ideal_tokens / prompt_tokens."""
        return self.ideal_tokens / self.prompt_tokens

    @property
    def above_ideal(self) -> float:
        """Share of prompt tokens that were cached beyond the ideal; 0 at or below it."""
        return max(0, self.cached_tokens - self.ideal_tokens) / self.prompt_tokens


def count_outcomes(run: RunData, chosen: "Flags") -> Counts:
    """Requests by status, of the chosen ones ([requests] bool)."""
    numbers = np.bincount(run.requests["status"][chosen], minlength=len(Status))
    return Counts(
        offered=int(chosen.sum()),
        ok=int(numbers[Status.OK]),
        error=int(numbers[Status.ERROR]),
        refused=int(numbers[Status.REFUSED]),
        timeout=int(numbers[Status.TIMEOUT]),
        cancelled=int(numbers[Status.CANCELLED]),
        dropped=int(numbers[Status.DROPPED]),
        in_flight=int(numbers[Status.IN_FLIGHT]),
        unsent=int(numbers[Status.UNSENT]),
    )


def account_tokens(run: RunData, samples: "Samples") -> TokenAccount:
    """Compares lengths with the plan, request by request, so that too long and too short do not cancel out."""
    done = samples.completed
    requested, achieved = run.workload.output_tokens[done], samples.num_tokens[done]
    reported = done & (run.requests["server_input_tokens"] != ABSENT)
    planned = run.workload.input_tokens[reported]
    server = run.requests["server_input_tokens"][reported].astype(np.int64)
    return TokenAccount(
        requested_output=int(requested.sum()),
        achieved_output=int(achieved.sum()),
        output_off=_off(achieved, requested),
        planned_input=int(planned.sum()),
        server_input=int(server.sum()),
        input_off=_off(server, planned),
    )


def account_cache(run: RunData, samples: "Samples") -> CacheUse | None:
    """Returns the prefix cache's hits and the workload's own sharing; None where the server reports none.

    vLLM reports hits only of prompts that had some: the others that it counted had none.
    """
    cached = run.requests["server_cached_tokens"].astype(np.int64)
    if not (samples.completed & (cached != ABSENT)).any():
        return None
    reported = samples.completed & ((cached != ABSENT) | (run.requests["server_input_tokens"] != ABSENT))
    prompt_tokens = run.workload.input_tokens
    overhead = (run.settings.get("text_prompts") or {}).get("overhead_tokens", 0)  # the same before every prompt
    ideal = np.minimum(ideal_cached_tokens(run.workload) + max(0, overhead), prompt_tokens)
    return CacheUse(
        prompt_tokens=int(prompt_tokens[reported].sum()),
        cached_tokens=int(np.maximum(cached, 0)[reported].sum()),
        ideal_tokens=int(ideal[reported].sum()),
    )


def _off(counted: "NDArray[np.int64]", planned: "NDArray[np.int64]") -> float:
    return float(np.abs(counted - planned).sum() / planned.sum()) if len(planned) else float("nan")
