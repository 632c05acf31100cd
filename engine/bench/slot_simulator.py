"""How many steps a batch of seats needs, counted seat by seat and step by step: no formula, no scheduler.

A request of n output tokens sits for n steps: its prompt fits into the first, which yields the first token.
"""

from collections import deque
from collections.abc import Sequence


def continuous_steps(lengths: Sequence[int], num_seats: int) -> int:
    """Steps until all are done when a seat is taken again in the step after it became empty.

    Args:
        lengths: output tokens of each request, in the order of the queue.
        num_seats: requests that run at once.
    """
    waiting = deque(lengths)
    seats: list[int] = []
    num_steps = 0
    while waiting or seats:
        while waiting and len(seats) < num_seats:
            seats.append(waiting.popleft())
        seats = [left - 1 for left in seats if left > 1]
        num_steps += 1
    return num_steps


def static_steps(lengths: Sequence[int], num_seats: int) -> int:
    """Steps until all are done when seats are taken again only once all are empty. Arguments as above."""
    waiting = deque(lengths)
    seats: list[int] = []
    num_steps = 0
    while waiting or seats:
        if not seats:
            while waiting and len(seats) < num_seats:
                seats.append(waiting.popleft())
        seats = [left - 1 for left in seats if left > 1]
        num_steps += 1
    return num_steps
