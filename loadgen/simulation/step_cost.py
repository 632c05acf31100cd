"""How long a step takes: the form of the engine's own model of step times, for known devices or fitted from a step log.

`engine.core.latency.step_time` has the five terms. Here they are the truth that the simulated engine has to learn.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior

_Floats = npt.NDArray[np.float64]


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
    cost: StepTimePrior
    kv_cache_tokens: int
    num_accelerators: int = 1
    max_steps_in_flight: int = 2


StepCost = StepTimePrior
"""The truth has the form of the engine's prior: five coefficients in seconds, and a knee in tokens."""

# One H200 with an 8B model: fitted to the recorded cost table, whose steps (64 rows at 1k of context 7.3 ms, 256 rows
# 14.7 ms, a prompt of 8k 215 ms, of 32k 1.4 s) it gives within 5 %. The knee is where 4.2 ms of reading weights equal
# 20.5 us per token. The 70B shape is derived from it, not measured: the same shares of peak bandwidth and FLOP/s over
# four devices (80 layers of 64 query and 8 KV heads of 128), with 160 all-reduces of 10 us per step, and of 16 KiB per
# token at 450 GB/s.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "h200-8b", "one H200, 8B in bf16",
            StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), 205),
            kv_cache_tokens=832_000,
        ),
        Device(
            "h200x4-70b", "four H200, 70B in bf16",
            StepTimePrior(Coefficients(3.1e-3, 51e-6, 0.5e-6, 22.8e-9, 1.71e-9), 180),
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
        self,
        cost: StepTimePrior,
        *,
        noise: float,
        stall_share: float,
        stall_s: float,
        seed: str,
    ) -> None:
        self._cost = StepTimeModel(cost)  # never observes anything
        self._noise = noise
        self._stall_share = stall_share
        self._stall_s = stall_s
        self._random = random.Random(seed)

    def seconds(self, shape: StepShape) -> float:
        """Returns the duration of the next step."""
        step_s = self._cost.predict_s(shape)
        if self._noise:
            step_s *= math.exp(self._random.gauss(0.0, self._noise))
        if self._stall_share and self._random.random() < self._stall_share:
            step_s += self._stall_s
        return step_s


def prompt_seconds(cost: StepTimePrior, input_tokens: _Floats, cached_tokens: _Floats) -> _Floats:
    """Returns the least device time of prompts: their products and their attention in an endless batch, no weights.

    Where a fit says that one-token rows are cheaper, it is cheapest to compute a prompt in those.
    """
    _, token_s, row_s, kv_token_s, pair_s = cost.coefficients
    num_new = input_tokens - cached_tokens
    num_pairs = num_new * (cached_tokens + (num_new + 1) / 2)
    return (token_s + min(row_s, 0.0)) * num_new + min(pair_s, kv_token_s) * num_pairs


def answer_seconds(cost: StepTimePrior, input_tokens: _Floats, output_tokens: _Floats) -> _Floats:
    """Returns the same of answers, without the first token, which comes with the prompt."""
    _, token_s, row_s, kv_token_s, _ = cost.coefficients
    return output_tokens * (token_s + row_s + kv_token_s * (input_tokens + output_tokens / 2))
