"""A window of steady state: every seat taken, requests in every phase of their answers, one comes when one leaves."""

import contextlib
import gc
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.bench.floor import Length
from engine.bench.gpu.driver import Delivery, EngineDriver, RequestMaker
from engine.bench.gpu.lengths import in_progress
from engine.core.request import Request, RequestId

_BACKLOG = 8  # requests that wait, so that no step finds a seat and nobody to take it
_SETTLE_STEPS = 50


@dataclass(frozen=True, slots=True)
class Window:
    """What was delivered in it.

    Attributes:
        seconds: its length.
        num_tokens: output tokens.
        num_finished: requests.
        mean_running: requests that held blocks, over the steps.
        step_s: of every step, from one delivery to the next.
        step_tokens: tokens of every step.
    """

    seconds: float
    num_tokens: int
    num_finished: int
    mean_running: float
    step_s: tuple[float, ...]
    step_tokens: tuple[int, ...]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.num_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """As a report holds it."""
        return {
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
            "num_finished": self.num_finished,
            "mean_running": self.mean_running,
            "step_s": [round(seconds, 6) for seconds in self.step_s],
            "step_tokens": self.step_tokens,
        }


def continuous_window(
    driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length], num_seats: int, seconds: float
) -> Window:
    """Continuous batching: seats are filled with requests in progress, and when each has had a token and some steps
    have passed, the window begins.

    Args:
        driver: of a scheduler with so many seats and nothing to do; it has nothing to do again afterwards.
        maker: of the requests.
        lengths: of the requests that come, again and again.
        num_seats: requests at a time.
        seconds: of the window, at least.
    """
    first = [maker.make(length) for length in in_progress(lengths, num_seats)]
    flow = _Flow(driver, maker, lengths)
    driver.submit(first)
    flow.add(_BACKLOG)
    silent: set[RequestId] = {request.request_id for request in first}
    num_settled = 0
    window: list[Delivery] = []
    with _no_collections(driver):
        while True:
            for delivery, _ in flow.turn():
                silent.difference_update(output.request_id for output in delivery.outputs)
                num_settled += not silent
                if num_settled > _SETTLE_STEPS:
                    window.append(delivery)
                    if delivery.ended_s - window[0].ended_s >= seconds:
                        return _window(window)


def static_window(
    driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length], num_seats: int, seconds: float
) -> Window:
    """Static batches: the window begins with the end of the first batch and ends with that of another; arguments as of
    `continuous_window`.
    """
    flow = _Flow(driver, maker, lengths)
    flow.add(3 * num_seats)
    window: list[Delivery] = []
    num_finished = 0
    with _no_collections(driver):
        while True:
            for delivery, newly_finished in flow.turn():
                num_finished += newly_finished
                ends_batch = newly_finished > 0 and num_finished % num_seats == 0
                if window or ends_batch:
                    window.append(delivery)
                if ends_batch and delivery.ended_s - window[0].ended_s >= seconds:
                    return _window(window)


class _Flow:
    """Turns the loop; whoever leaves is followed by another."""

    def __init__(self, driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length]) -> None:
        self._driver = driver
        self._coming: Iterator[Request] = (maker.make(length) for length in itertools.cycle(lengths))

    def add(self, count: int) -> None:
        """So many more."""
        if count:
            self._driver.submit(list(itertools.islice(self._coming, count)))

    def turn(self) -> Iterator[tuple[Delivery, int]]:
        """Deliveries, each with the number of requests that it completed."""
        for delivery in self._driver.turn():
            num_finished = sum(output.completion is not None for output in delivery.outputs)
            self.add(num_finished)
            yield delivery, num_finished


@contextlib.contextmanager
def _no_collections(driver: EngineDriver) -> Iterator[None]:
    """No garbage collection meanwhile: it walks all that the engine has, which the server freezes for that reason. The
    driver has nothing to do afterwards.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        driver.finish()


def _window(deliveries: Sequence[Delivery]) -> Window:
    """Of what came after the first delivery, up to and with the last."""
    counted = deliveries[1:]
    return Window(
        seconds=deliveries[-1].ended_s - deliveries[0].ended_s,
        num_tokens=sum(len(output.token_ids) for delivery in counted for output in delivery.outputs),
        num_finished=sum(output.completion is not None for delivery in counted for output in delivery.outputs),
        mean_running=statistics.fmean(delivery.num_running for delivery in counted),
        step_s=tuple(b.ended_s - a.ended_s for a, b in itertools.pairwise(deliveries)),
        step_tokens=tuple(delivery.num_tokens for delivery in counted),
    )
