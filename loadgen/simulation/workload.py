"""Requests of a simulation: a trace's arrivals and lengths, with a service class for each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from chairlift.service.service_classes import ServiceClass
from engine.core.latency.targets import LatencyTargets, Pacing, WhenInfeasible
from loadgen.errors import OptionError
from loadgen.service_mix import class_weights, draw_classes
from loadgen.trace.schema import Trace

NO_CLASS = ServiceClass(name="default")
END_TOKEN = 1
"""Ends an answer. Only the twin knows when; no policy sees the length of an answer."""

OTHER_TOKEN = 2
_FIRST_PROMPT_TOKEN = 3


class Outcome(Enum):
    """How a request ended. Every request has exactly one."""

    COMPLETED = "completed"
    REFUSED = "refused"
    UNFINISHED = "unfinished"


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request: what the trace says, and what became of it.

    Attributes:
        index: in order of arrival, from 1.
        arrival_s: virtual seconds.
        input_tokens, output_tokens: lengths.
        service_class: whose targets it has.
        prompt_blocks: token id of each of its blocks of `block_tokens` tokens; empty: it shares nothing.
        block_tokens: tokens of a block of the trace.
        engine: index of the engine that got it.
        num_cached_tokens: of the prompt, found in the engine's prefix cache.
        num_computed_tokens: prompt tokens computed for it, also repeatedly.
        first_s, last_s: virtual seconds of its first and its last token; NaN before.
        num_tokens: tokens generated.
        num_late_tokens: of these, after `first + k * inter_token_s`.
        num_wide_gaps: gaps above `inter_token_s`.
        ended_s: virtual seconds of its end.
        outcome, reason: how and why it ended; None and "" before.
    """

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    service_class: ServiceClass
    prompt_blocks: tuple[int, ...] = ()
    block_tokens: int = 0
    inter_token_s: float = field(init=False)
    engine: int = -1
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    first_s: float = math.nan
    last_s: float = math.nan
    num_tokens: int = 0
    num_late_tokens: int = 0
    num_wide_gaps: int = 0
    ended_s: float = math.nan
    outcome: Outcome | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        own = self.service_class.inter_token_s
        self.inter_token_s = math.inf if own is None else own

    def prompt_ids(self) -> tuple[int, ...]:
        """Returns token ids: equal where prompts share a block, otherwise the request's own."""
        if not self.prompt_blocks:
            return (_FIRST_PROMPT_TOKEN + self.index,) * self.input_tokens
        ids: list[int] = []
        for block in self.prompt_blocks:
            ids += [block] * self.block_tokens
        return tuple(ids[: self.input_tokens])

    def end(self, outcome: Outcome, reason: str, now_s: float) -> None:
        """Records the end.

        Raises: AssertionError: it has ended before.
        """
        assert self.outcome is None, f"request {self.index} is {outcome.value} after it was {self.outcome}"
        self.outcome, self.reason, self.ended_s = outcome, reason, now_s


def targets_of(service_class: ServiceClass) -> LatencyTargets | None:
    """Returns what the scheduler reads: the first token is due before `headroom`; None if there are no classes."""
    if service_class is NO_CLASS:
        return None
    ttft_s = service_class.ttft_s
    return LatencyTargets(
        ttft_s=None if ttft_s is None else ttft_s * (1 - service_class.headroom),
        inter_token_s=service_class.inter_token_s,
        pacing=Pacing(service_class.pacing),
        when_infeasible=WhenInfeasible(service_class.when_infeasible),
        value=service_class.weight,
        service_class=service_class.name,
    )


def requests_of(
    trace: Trace, classes: Mapping[str, ServiceClass], mix: Mapping[str, float], seed: int
) -> list[SimulatedRequest]:
    """Returns the requests of a trace, each with a class drawn at random.

    Args:
        trace: arrivals from 0.
        classes: by name; empty: all requests are of one class without targets.
        mix: weight of each class by name; empty: all alike.
        seed: of the classes.

    Raises: OptionError: the mix names an unknown class or has no weight above 0.
    """
    if mix and not classes:
        raise OptionError("--mix needs --service-classes, which names the classes")
    known = classes or {NO_CLASS.name: NO_CLASS}
    own_classes = list(known.values())
    chosen = draw_classes(class_weights(known, mix), len(trace), seed).tolist()
    blocks = trace.blocks
    ids = None if blocks is None else np.unique(blocks.ids, return_inverse=True)[1]
    requests = []
    for index, (arrival_s, input_tokens, output_tokens) in enumerate(
        zip(trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    ):
        own: Sequence[int] = ()
        if blocks is not None and ids is not None:
            own = (ids[blocks.offsets[index] : blocks.offsets[index + 1]] + _FIRST_PROMPT_TOKEN).tolist()
        requests.append(
            SimulatedRequest(
                index=index + 1,
                arrival_s=arrival_s,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                service_class=own_classes[chosen[index]],
                prompt_blocks=tuple(own),
                block_tokens=0 if blocks is None else blocks.block_tokens,
            )
        )
    return requests
