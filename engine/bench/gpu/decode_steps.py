"""Steps of one kind, timed from one delivery to the next: batches in which every request decodes, and prefill steps."""

from dataclasses import dataclass
from itertools import pairwise

from chairlift.bench.benchmark import BenchmarkError
from engine.bench.floor import Length
from engine.bench.gpu.driver import GREEDY, Delivery, EngineDriver, RequestMaker
from engine.core.request import RequestId, SamplingParams

_SETTLE = 8  # steps after the last prompt, until those in flight are all decodes


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A batch in which all decode.

    Attributes:
        batch: requests.
        context: tokens of each, about, in the middle of what is timed.
        num_steps: that are timed.
    """

    batch: int
    context: int
    num_steps: int

    def length(self, max_num_batched_tokens: int) -> Length:
        """Prompt and answer that put the requests there: the first of them decode while the last are still prompts."""
        num_prefill_steps = -(-self.batch * self.context // max_num_batched_tokens)
        ahead = num_prefill_steps // 2 + _SETTLE + self.num_steps // 2
        return Length(max(1, self.context - ahead), 2 * num_prefill_steps + 2 * _SETTLE + self.num_steps)


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """What was timed.

    Attributes:
        step_s: seconds from each delivery to the next.
        mean_context: tokens per request in the middle of it.
    """

    step_s: tuple[float, ...]
    mean_context: float


class Decoding:
    """A batch that decodes, for the length of a `with` block.

    Args:
        driver: of a scheduler with room for it and nothing else to do.
        maker: of its requests.
        point: the batch.
        max_num_batched_tokens: of the engine's steps.
        params: how to sample.
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
        length = point.length(max_num_batched_tokens)
        requests = [maker.make(length, params) for _ in range(point.batch)]
        self._num_tokens = {request.request_id: length.prompt for request in requests}
        driver.submit(requests)

    def __enter__(self) -> "Decoding":
        """Computes the prompts."""
        started: set[RequestId] = set()
        while len(started) < self._point.batch:
            for delivery in self._turn():
                started.update(output.request_id for output in delivery.outputs)
        self.steps(_SETTLE)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the requests."""
        self._driver.finish()

    def steps(self, num_steps: int) -> DecodeSteps:
        """Times so many steps.

        Raises: BenchmarkError: in one of them not every request got a token.
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
    """Seconds from the first delivery to the last of prompts that come at once and answer with one token: every step
    in between is full.

    Args:
        driver: as of `Decoding`.
        maker: of the requests.
        prompt_len: tokens of each prompt.
        num_prompts: of which those of the first step are not timed.
    Returns: seconds per prompt.
    Raises: BenchmarkError: all were done in one step.
    """
    driver.submit([maker.make(Length(prompt_len, 1)) for _ in range(num_prompts)])
    deliveries: list[Delivery] = []
    while driver.num_open:
        deliveries += driver.turn()
    driver.finish()
    num_timed = sum(len(delivery.outputs) for delivery in deliveries[1:])
    if not num_timed:
        raise BenchmarkError(f"{num_prompts} prompts of {prompt_len} tokens were one step: nothing to time")
    return (deliveries[-1].ended_s - deliveries[0].ended_s) / num_timed
