"""A device's stream for tests, on the host's thread, that does its work late and out of the host's sight.

Memory that the host uses again too early, or reads too soon, then holds the wrong thing.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

POISON = -77


class LateStream:
    """`engine.runner.stream.Stream` that keeps what it is given and does it at seeded random moments, at the latest
    when an event is waited for.

    Args:
        seed: of when things are done.
        eagerness: chance that the next piece of work is done, whenever there is an occasion.
    """

    device = torch.device("cpu")
    is_inline = False

    def __init__(self, seed: int = 0, eagerness: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._eagerness = eagerness
        self._queue: deque[Callable[[], None]] = deque()
        self._num_queued = 0

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Memory full of nonsense."""
        return torch.full((num_bytes,), POISON & 0xFF, dtype=torch.uint8)

    def run(self, work: Callable[[], None]) -> None:
        """Queues work."""
        self._queue.append(work)
        self._num_queued += 1
        self.move_on()

    def mark(self) -> "LateEvent":
        """An event behind what is queued."""
        return LateEvent(self, self._num_queued)

    def move_on(self) -> None:
        """An occasion to do some of what is queued."""
        while self._queue and self._random.random() < self._eagerness:
            self._do_next()

    def wait_for(self, num_works: int) -> None:
        """Completes the first works that are left, and perhaps more."""
        while self._num_queued - len(self._queue) < num_works:
            self._do_next()
        self.move_on()

    @torch.inference_mode()
    def _do_next(self) -> None:
        self._queue.popleft()()


@dataclass(frozen=True, slots=True)
class LateEvent:
    """A place in a `LateStream`."""

    stream: LateStream
    num_works: int

    def wait(self) -> None:
        """Makes it happen."""
        self.stream.wait_for(self.num_works)
