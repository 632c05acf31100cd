"""What bare seats would do with the same answers, counted seat by seat: no scheduler, no model, no clock.

An answer of n tokens sits for n steps, for its whole prompt fits into the first of them. Requests sit down in the order
of the queue, and a seat is taken again either in the very next step, or only when all seats are empty: iteration-level
and request-level scheduling, as Orca (OSDI'22) calls them.
"""

from collections import deque
from collections.abc import Sequence


def rows_of_steps(lengths: Sequence[int], num_seats: int, *, static: bool) -> list[int]:
    """How many seats are taken in each step until all have left.

    Args:
        lengths: tokens of each answer, at least 1, in the order of the queue.
        num_seats: at least 1.
        static: seats are taken again only when all are empty.
    Returns: [steps] taken seats; their number is the number of steps, their sum that of the tokens.
    Raises: ValueError: no seats, or an answer without tokens.
    """
    if num_seats < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"{num_seats} seats and answers of {min(lengths, default=1)} tokens and more: at least 1 each")
    queue = deque(lengths)
    tokens_left: list[int] = []  # one entry per taken seat
    rows = []
    while queue or tokens_left:
        if not (static and tokens_left):
            while queue and len(tokens_left) < num_seats:
                tokens_left.append(queue.popleft())
        rows.append(len(tokens_left))
        tokens_left = [tokens - 1 for tokens in tokens_left if tokens > 1]
    return rows
