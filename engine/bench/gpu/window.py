"""A window of steady state: every slot is taken, by requests in all phases, and each finished request is replaced."""

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

_BACKLOG = 8  # waiting requests, so that no slot stays empty in a step
_SETTLE_STEPS = 50  # or as many as there are slots


@dataclass(frozen=True, slots=True)
class Window:
    """Deliveries in a window.

    Attributes:
        seconds: its length.
        num_tokens: output tokens.
        num_finished: finished requests.
        mean_running: mean number of running requests over the steps.
        step_s: seconds of every step, from one delivery to the next.
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
        """Output tokens per second."""
        return self.num_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Returns the fields for a report."""
        return {
            "seconds": self.seconds,
            "num_tokens": self.num_tokens,
            "num_finished": self.num_finished,
            "mean_running": self.mean_running,
            "step_s": [round(seconds, 6) for seconds in self.step_s],
            "step_tokens": self.step_tokens,
        }


def continuous_window(
    driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length], num_slots: int, seconds: float
) -> Window:
    """Measures continuous batching. Slots are filled with requests in progress; the window starts when each has had a
    token and some steps have passed.

    Args:
        driver: driver of an idle scheduler with num_slots slots; idle again afterwards.
        maker: makes the requests.
        lengths: lengths of the requests, repeated cyclically.
        num_slots: slots.
        seconds: least length of the window.
    """
    first = [maker.make(length) for length in in_progress(lengths, num_slots)]
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
                if num_settled > min(_SETTLE_STEPS, num_slots):
                    window.append(delivery)
                    if delivery.ended_s - window[0].ended_s >= seconds:
                        return _window(window)


def static_window(
    driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length], num_slots: int, seconds: float
) -> Window:
    """Measures static batches. The window starts at the end of the first batch and ends at that of a later one.

    Arguments as in `continuous_window`.
    """
    flow = _Flow(driver, maker, lengths)
    flow.add(3 * num_slots)
    window: list[Delivery] = []
    num_finished = 0
    with _no_collections(driver):
        while True:
            for delivery, newly_finished in flow.turn():
                num_finished += newly_finished
                ends_batch = newly_finished > 0 and num_finished % num_slots == 0
                if window or ends_batch:
                    window.append(delivery)
                if ends_batch and delivery.ended_s - window[0].ended_s >= seconds:
                    return _window(window)


class _Flow:
    """Runs the loop and replaces each finished request."""

    def __init__(self, driver: EngineDriver, maker: RequestMaker, lengths: Sequence[Length]) -> None:
        self._driver = driver
        self._coming: Iterator[Request] = (maker.make(length) for length in itertools.cycle(lengths))

    def add(self, count: int) -> None:
        """Adds requests."""
        if count:
            self._driver.submit(list(itertools.islice(self._coming, count)))

    def turn(self) -> Iterator[tuple[Delivery, int]]:
        """Returns deliveries, each with the number of requests that it completed."""
        for delivery in self._driver.turn():
            num_finished = sum(output.completion is not None for output in delivery.outputs)
            self.add(num_finished)
            yield delivery, num_finished


@contextlib.contextmanager
def _no_collections(driver: EngineDriver) -> Iterator[None]:
    """Disables garbage collection, which would scan all objects of the engine; the server freezes them instead."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        driver.finish()


def _window(deliveries: Sequence[Delivery]) -> Window:
    """Makes a window from the deliveries after the first."""
    counted = deliveries[1:]
    return Window(
        seconds=deliveries[-1].ended_s - deliveries[0].ended_s,
        num_tokens=sum(len(output.token_ids) for delivery in counted for output in delivery.outputs),
        num_finished=sum(output.completion is not None for delivery in counted for output in delivery.outputs),
        mean_running=statistics.fmean(delivery.num_running for delivery in counted),
        step_s=tuple(b.ended_s - a.ended_s for a, b in itertools.pairwise(deliveries)),
        step_tokens=tuple(delivery.num_tokens for delivery in counted),
    )
