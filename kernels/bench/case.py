"""One kernel on one set of inputs: checked against fp32 first, then timed, then set beside its floor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kernels.bench.ceilings import Ceilings
from kernels.bench.device import BenchDevice
from kernels.bench.figure import Figure
from kernels.bench.timing import Timing, time_calls

Unit = Literal["GB/s", "TFLOP/s", "us"]


class WrongResultError(Exception):
    """A kernel's result is too far from the reference's: its speed would mean nothing."""


class Prepared(NamedTuple):
    """A case with its inputs.

    Attributes:
        calls: the kernel on inputs of its own each, together larger than the L2 cache.
        error: computes how far a result is from the reference's, as `relative_error` does.
    """

    calls: Sequence[Callable[[], object]]
    error: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure.

    Attributes:
        what: kernel, dtype and shape.
        prepare: makes the inputs.
        num_bytes: the fewest that must be moved: inputs read once, outputs written once.
        num_flops: of products, multiply and add counted apart.
        flops_dtype: whose ceiling they count against.
        unit: of the figure: a rate of bytes or of operations, or the time of a call.
        max_error: more is wrong.
        goal_id: of `goal_fraction` and `goal_rate`.
        goal_fraction: of the floor.
        goal_rate: in `unit`, instead of a fraction.
        adds_up: whether reading and computing are different parts of the work, so that their floors add up.
    """

    what: str
    prepare: Callable[[], Prepared]
    num_bytes: int
    unit: Unit
    max_error: float
    num_flops: int = 0
    flops_dtype: str = "bfloat16"
    goal_id: str = ""
    goal_fraction: float | None = None
    goal_rate: float | None = None
    adds_up: bool = False

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds that no kernel beats on this device."""
        flops = ceilings.flops.get(self.flops_dtype) or max(ceilings.flops.values())
        parts = (self.num_bytes / ceilings.bytes_per_s, self.num_flops / flops)
        return sum(parts) if self.adds_up else max(parts)

    def in_unit(self, seconds: float) -> float:
        """A time of this case in its unit."""
        if self.unit == "us":
            return 1e6 * seconds
        return self.num_bytes / seconds / 1e9 if self.unit == "GB/s" else self.num_flops / seconds / 1e12


def run_case(case: Case, device: BenchDevice, ceilings: Ceilings, *, seconds: float) -> tuple[Figure, Timing]:
    """Checks and times a case.

    Args:
        case: what to measure.
        device: where.
        ceilings: of the same run.
        seconds: about how long to measure.
    Raises: WrongResultError: the result is wrong; nothing was timed.
    """
    prepared = case.prepare()
    error = prepared.error()
    if not error <= case.max_error:  # NaN is wrong
        raise WrongResultError(f"{case.what}: relative error {error:.3g}, at most {case.max_error:g} is right")
    timing = time_calls(prepared.calls, device.device, seconds=seconds)
    floor_s = case.floor_s(ceilings)
    goal_s = floor_s / case.goal_fraction if case.goal_fraction is not None else None
    goal = case.goal_rate if goal_s is None else case.in_unit(goal_s)
    notes = [f"{1e6 * timing.median_s:,.1f} us +-{50 * timing.spread:.1f} %", f"error {error:.1e}"]
    if timing.method == "events":
        notes.append("not captured in a graph: launch gaps included")
    figure = Figure(
        goal_id=case.goal_id,
        what=case.what,
        measured=case.in_unit(timing.median_s),
        unit=case.unit,
        less_is_better=case.unit == "us",
        goal=goal,
        floor=case.in_unit(floor_s),
        note="; ".join(notes),
    )
    return figure, timing


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Length of the difference over the length of what is expected, in float64; NaN if either has one."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def num_copies(device: BenchDevice, num_bytes: int, *, most: int = 64) -> int:
    """How many sets of inputs of this size are together four times the L2 cache."""
    return max(1, min(most, -(-4 * device.l2_bytes // num_bytes)))
