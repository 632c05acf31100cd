"""Which waiting prompts cannot all have their first token in time.

Method: Moore-Hodgson (Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs").
Prompts are taken in the order of their due times. Whenever one would be late, a prompt is given up, of all those taken
so far the one that loses least: first those of tenants over their share, then the least value per second that it costs.
If values are equal and costs are the work until the first token, this leaves the fewest late prompts on one machine.
The cost includes the expected answer: a prompt with a long answer takes time from prompts that come later.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple


class WaitingPrompt(NamedTuple):
    """A prompt that waits, as this decision needs it.

    Attributes:
        due_s: when its first token is due, monotonic seconds.
        work_s: seconds to compute it, without the prefix that is cached.
        value: of its targets being met, relative to others.
        is_over_share: whether its tenant has received more than its share.
        must_stay: it was promised or has begun, and is never given up.
        cost_s: seconds of the device for the prompt and its answer; None: as `work_s`.
    """

    due_s: float
    work_s: float
    value: float = 1.0
    is_over_share: bool = False
    must_stay: bool = False
    cost_s: float | None = None


class Slots(NamedTuple):
    """Free slots, and how many are released per second as answers end; None: unknown, so that slots do not limit."""

    num_free: int
    released_per_s: float | None = None


class LatePrompt(NamedTuple):
    """A prompt to give up: its position, and when its first token was expected when that was decided."""

    position: int
    expected_s: float


def find_late(prompts: Iterable[WaitingPrompt], now_s: float, start_s: float, slots: Slots) -> list[LatePrompt]:
    """Returns the prompts to give up, so that the others can be in time.

    Args:
        prompts: in the order of their due times.
        now_s: monotonic seconds.
        start_s: when the first of them can start: after the running step and the prompts that run.
        slots: a prompt beyond the free ones starts when enough have been released.
    Complexity: O(n log n).
    """
    late: list[LatePrompt] = []
    taken: list[tuple[bool, float, int, float]] = []  # heap; the first one loses least
    end_s = start_s
    for index, prompt in enumerate(prompts):
        num_behind = index - len(late) - slots.num_free + 1
        if num_behind > 0 and slots.released_per_s is not None:
            end_s = max(end_s, now_s + num_behind / max(slots.released_per_s, 1e-9))
        end_s += prompt.work_s
        if not prompt.must_stay:
            cost_s = prompt.work_s if prompt.cost_s is None else prompt.cost_s
            value_per_s = prompt.value / max(cost_s, 1e-9)
            heapq.heappush(taken, (not prompt.is_over_share, value_per_s, index, prompt.work_s))
        if end_s > prompt.due_s and taken:
            _, _, given_up, work_s = heapq.heappop(taken)
            late.append(LatePrompt(given_up, end_s))
            end_s -= work_s
    return late
