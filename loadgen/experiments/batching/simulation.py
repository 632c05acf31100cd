"""Simulation of both policies by counting slots: no scheduler, no model, no clock.

An answer of n tokens runs for n steps, for its whole prompt fits into the first of them. Requests start in the order
of the queue, and a slot is taken again either in the very next step, or only when all slots are empty: iteration-level
and request-level scheduling, as Orca (OSDI'22) calls them.
"""

from collections import deque
from collections.abc import Sequence


def rows_of_steps(lengths: Sequence[int], num_slots: int, *, static: bool) -> list[int]:
    """Returns how many slots are taken in each step until all answers are complete.

    Args:
        lengths: tokens of each answer, at least 1, in the order of the queue.
        num_slots: at least 1.
        static: slots are taken again only when all are empty.
    Returns: [steps] taken slots; their number is the number of steps, their sum that of the tokens.
    Raises: ValueError: no slots, or an answer without tokens.
    """
    if num_slots < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"{num_slots} slots and answers of {min(lengths, default=1)} tokens and more: at least 1 each")
    queue = deque(lengths)
    tokens_left: list[int] = []  # one entry per taken slot
    rows = []
    while queue or tokens_left:
        if not (static and tokens_left):
            while queue and len(tokens_left) < num_slots:
                tokens_left.append(queue.popleft())
        rows.append(len(tokens_left))
        tokens_left = [tokens - 1 for tokens in tokens_left if tokens > 1]
    return rows
