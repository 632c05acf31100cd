"""Times decode-only steps and prefill steps, from one delivery to the next."""

from dataclasses import dataclass
from itertools import pairwise

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.floor import Length
from engine.bench.gpu.driver import GREEDY, Delivery, EngineDriver, RequestMaker
from engine.core.request import RequestId, SamplingParams

_SETTLE = 8


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A decode-only batch.

    Attributes:
        batch: number of requests.
        context: approximate tokens of each in the middle of the timed steps.
        num_steps: timed steps.
        num_settling: steps after the last prompt, until all steps in flight are decodes.
        longest: tokens of the first request instead; None: as of the others.
    """

    batch: int
    context: int
    num_steps: int
    num_settling: int = _SETTLE
    longest: int | None = None

    @property
    def label(self) -> str:
        """Description for reports."""
        longest = "" if self.longest is None else f", one of {self.longest:,}"
        return f"decode step, batch {self.batch}, context {self.context:,}{longest}"

    @property
    def contexts(self) -> tuple[int, ...]:
        """Approximate tokens of each request."""
        return (self.longest or self.context, *(self.context,) * (self.batch - 1))

    def lengths(self, max_num_batched_tokens: int) -> list[Length]:
        """Lengths that reach this point: the first requests decode while the last are still in prefill."""
        num_prefill_steps = -(-sum(self.contexts) // max_num_batched_tokens)
        ahead = num_prefill_steps // 2 + self.num_settling + self.num_steps // 2
        output = 2 * num_prefill_steps + 2 * self.num_settling + self.num_steps
        return [Length(max(1, context - ahead), output) for context in self.contexts]


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """Timed steps.

    Attributes:
        step_s: seconds from each delivery to the next.
        mean_context: tokens per request in the middle of the steps.
    """

    step_s: tuple[float, ...]
    mean_context: float


class Decoding:
    """A decoding batch, as a context manager.

    Args:
        driver: driver of an idle scheduler with enough capacity.
        maker: makes the requests.
        point: the batch.
        max_num_batched_tokens: token budget of the engine's steps.
        params: sampling parameters.
    """

    def __init__(
        self,
        driver: EngineDriver,
        maker: RequestMaker,
        point: DecodePoint,
        max_num_batched_tokens: int,
        params: SamplingParams = GREEDY,
    ) -> None:
        self._driver = driver
        self._point = point
        requests = [maker.make(length, params) for length in point.lengths(max_num_batched_tokens)]
        self._num_tokens = {request.request_id: len(request.prompt_ids) for request in requests}
        driver.submit(requests)

    def __enter__(self) -> "Decoding":
        """Computes the prompts."""
        started: set[RequestId] = set()
        while len(started) < self._point.batch:
            for delivery in self._turn():
                started.update(output.request_id for output in delivery.outputs)
        self.steps(self._point.num_settling)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the requests."""
        self._driver.finish()

    def steps(self, num_steps: int) -> DecodeSteps:
        """Times num_steps steps.

        Raises: BenchmarkError: a request got no token in one of them.
        """
        deliveries: list[Delivery] = []
        contexts = []
        while len(deliveries) <= num_steps:
            deliveries += self._turn()
            contexts.append(sum(self._num_tokens.values()) / self._point.batch)
        for delivery in deliveries[1:]:
            if len(delivery.outputs) != self._point.batch:
                raise BenchmarkError(f"{len(delivery.outputs)} of {self._point.batch} requests got a token in a step")
        step_s = tuple(b.ended_s - a.ended_s for a, b in pairwise(deliveries))
        return DecodeSteps(step_s[:num_steps], contexts[len(contexts) // 2])

    def _turn(self) -> list[Delivery]:
        deliveries = self._driver.turn()
        for delivery in deliveries:
            for output in delivery.outputs:
                self._num_tokens[output.request_id] += len(output.token_ids)
        return deliveries


def prefill_seconds(driver: EngineDriver, maker: RequestMaker, prompt_len: int, num_prompts: int) -> float:
    """Times prompts with one output token that arrive at once, from the first delivery to the last.

    All steps in between are full.

    Args:
        driver: as in `Decoding`.
        maker: makes the requests.
        prompt_len: tokens of each prompt.
        num_prompts: number of prompts; those of the first step are not timed.
    Returns: seconds per prompt.
    Raises: BenchmarkError: all prompts were computed in one step.
    """
    driver.submit([maker.make(Length(prompt_len, 1)) for _ in range(num_prompts)])
    deliveries: list[Delivery] = []
    while driver.num_open:
        deliveries += driver.turn()
    driver.finish()
    num_timed = sum(len(delivery.outputs) for delivery in deliveries[1:])
    if not num_timed:
        raise BenchmarkError(
            f"{num_prompts} prompts of {prompt_len} tokens were computed in one step, at least two are required"
        )
    return (deliveries[-1].ended_s - deliveries[0].ended_s) / num_timed
