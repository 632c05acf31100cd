"""Which waiting prompts cannot all have their first token in time.

Method: Moore-Hodgson (Moore 1968, "An n job, one machine sequencing algorithm for minimizing the number of late jobs").
Prompts are taken in the order of their due times. Whenever one would be late, a prompt is given up, of all those taken
so far the one that loses least: first those of tenants over their share, then the least value per second that it costs.
If this does not bring it in time, further ones are, up to its own value; otherwise it is given up alone. A prompt that
must stay is computed in its turn, in time or not: no other is given up for its sake.
If values are equal and costs are the work until the first token, this gives up the fewest prompts on one machine.
The cost includes the expected answer: a prompt with a long answer takes time from prompts that come later.
"""

import heapq
from collections.abc import Iterable
from typing import NamedTuple

_MAX_FOR_ONE = 16  # prompts that are given up at once; bounds the cost


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


class _Taken(NamedTuple):
    """A prompt that is taken so far, in the order of what is lost by giving it up."""

    is_within_share: bool  # those over their share count as no loss
    value_per_s: float
    position: int
    prompt: WaitingPrompt


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
    taken: list[_Taken] = []  # heap; the first one loses least
    end_s = start_s
    for index, prompt in enumerate(prompts):
        num_behind = index - len(late) - slots.num_free + 1
        slot_s = 0.0  # until one more slot is released, if it waits for one
        if num_behind > 0 and slots.released_per_s is not None:
            slot_s = 1.0 / max(slots.released_per_s, 1e-9)
            end_s = max(end_s, now_s + num_behind * slot_s)
        end_s += prompt.work_s
        if prompt.must_stay:
            continue
        expected_s = end_s
        cost_s = prompt.work_s if prompt.cost_s is None else prompt.cost_s
        own = _Taken(not prompt.is_over_share, prompt.value / max(cost_s, 1e-9), index, prompt)
        given_up: list[_Taken] = []
        loss = 0.0
        while end_s > prompt.due_s and loss < prompt.value and len(given_up) < _MAX_FOR_ONE:
            if not taken or taken[0] > own:
                break
            least = heapq.heappop(taken)
            given_up.append(least)
            end_s -= max(least.prompt.work_s, slot_s)
            loss += least.prompt.value * least.is_within_share
        if end_s > prompt.due_s:  # too little is gained by others: it is given up itself
            for one in given_up:
                heapq.heappush(taken, one)
            given_up, end_s = [own], expected_s - prompt.work_s
        else:
            heapq.heappush(taken, own)
        late += [LatePrompt(one.position, expected_s) for one in given_up]
    return late
