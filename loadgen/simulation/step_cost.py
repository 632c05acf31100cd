"""How long a step takes: five terms over what the step computes, for known devices or fitted from a step log.

    step_s = fixed_s + token_s * max(tokens, knee_tokens) + row_s * rows + kv_token_s * kv_tokens + pair_s * pairs

Prefill and decode need no case of their own. Below `knee_tokens` tokens the step only reads the weights, and further
tokens are free; where a knee of 0 says that there is no such range, `tokens` counts those of prompts alone, because a
one-token row then has its own price in `row_s`.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.core.outputs import SchedulerOutput


class StepShape(NamedTuple):
    """What a step computes.

    Attributes:
        tokens: tokens of all rows.
        rows: rows.
        narrow_rows: rows of one token.
        kv_tokens: tokens in the cache that one-token rows attend to.
        pairs: query x key pairs of wider rows.
    """

    tokens: int
    rows: int
    narrow_rows: int
    kv_tokens: int
    pairs: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of rows with more than one."""
        return self.tokens - self.narrow_rows


def shape_of(plan: SchedulerOutput) -> StepShape:
    """Returns the shape of a planned step."""
    num_rows = len(plan.rows)
    num_prompt_tokens = kv_tokens = pairs = num_wide = 0
    for row in reversed(plan.rows):  # one-token rows come first
        num_tokens = row.num_scheduled_tokens
        if num_tokens == 1:
            break
        num_wide += 1
        num_prompt_tokens += num_tokens
        pairs += num_tokens * row.num_computed_tokens + num_tokens * (num_tokens + 1) // 2
    for row in plan.rows[: num_rows - num_wide]:
        kv_tokens += row.num_computed_tokens
    return StepShape(plan.num_tokens, num_rows, num_rows - num_wide, kv_tokens, pairs)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients in seconds; see the module's docstring."""

    fixed_s: float
    token_s: float
    row_s: float
    kv_token_s: float
    pair_s: float
    knee_tokens: int = 0

    def seconds(self, shape: StepShape) -> float:
        """Returns the duration of a step without noise."""
        tokens = max(shape.tokens, self.knee_tokens) if self.knee_tokens else shape.prompt_tokens
        return (
            self.fixed_s
            + self.token_s * tokens
            + self.row_s * shape.rows
            + self.kv_token_s * shape.kv_tokens
            + self.pair_s * shape.pairs
        )

    def request_seconds(self, input_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
        """Returns the least device time of a request in a full batch: its products and its attention, no weights."""
        num_new = input_tokens - cached_tokens
        pairs = num_new * cached_tokens + num_new * (num_new + 1) / 2
        kv_tokens = output_tokens * (input_tokens + output_tokens / 2)
        tokens = num_new + (output_tokens if self.knee_tokens else 0)
        rows = 0 if self.knee_tokens else output_tokens
        return self.token_s * tokens + self.row_s * rows + self.pair_s * pairs + self.kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class Device:
    """A device, or a group of them, with one model on it.

    Attributes:
        name: as `--device` has it.
        what: device, model and number format.
        cost: of its steps.
        kv_cache_tokens: tokens that its KV cache holds.
        num_accelerators: of which an engine's cost is counted.
        max_steps_in_flight: of the engine's step loop.
    """

    name: str
    what: str
    cost: StepCost
    kv_cache_tokens: int
    num_accelerators: int = 1
    max_steps_in_flight: int = 2


# One H200 with an 8B model: fitted to the recorded cost table, whose steps (64 rows at 1k of context 7.3 ms, 256 rows
# 14.7 ms, a prompt of 8k 215 ms, of 32k 1.4 s) it gives within 5 %. The knee is where 4.2 ms of reading weights equal
# 20.5 us per token. The 70B shape is derived from it, not measured: the same shares of peak bandwidth and FLOP/s over
# four devices (80 layers of 64 query and 8 KV heads of 128), with 160 all-reduces of 10 us per step, and of 16 KiB per
# token at 450 GB/s.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "h200-8b", "one H200, 8B in bf16", StepCost(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9, 205),
            kv_cache_tokens=832_000,
        ),
        Device(
            "h200x4-70b", "four H200, 70B in bf16", StepCost(3.1e-3, 51e-6, 0.5e-6, 22.8e-9, 1.71e-9, 180),
            kv_cache_tokens=1_060_000, num_accelerators=4,
        ),
    )
}  # fmt: skip


class StepTimer:
    """Durations of the steps of one engine: the model's, times log-normal noise, plus rare stalls.

    Args:
        cost: the coefficients.
        noise: standard deviation of the logarithm; 0: none.
        stall_share: share of steps that stall.
        stall_s: seconds of a stall.
        seed: equal seeds give equal durations of equal steps.
    """

    def __init__(
        self, cost: StepCost, *, noise: float = 0.0, stall_share: float = 0.0, stall_s: float = 0.05, seed: str = "0"
    ) -> None:
        self._cost = cost
        self._noise = noise
        self._stall_share = stall_share
        self._stall_s = stall_s
        self._random = random.Random(seed)

    def seconds(self, shape: StepShape) -> float:
        """Returns the duration of the next step."""
        step_s = self._cost.seconds(shape)
        if self._noise:
            step_s *= math.exp(self._random.gauss(0.0, self._noise))
        if self._stall_share and self._random.random() < self._stall_share:
            step_s += self._stall_s
        return step_s
