"""One kernel on one set of inputs: checked against fp32, then timed and compared with its floor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from chairlift.bench.report import Direction, Result
from kernels.bench.ceilings import Ceilings
from kernels.bench.device import BenchDevice
from kernels.bench.expected import Expected
from kernels.bench.timing import Timing, time_calls

Unit = Literal["GB/s", "TFLOP/s", "us"]


class WrongResultError(Exception):
    """The result of a kernel differs too much from the reference, so its speed would be meaningless."""


class Prepared(NamedTuple):
    """A case with its inputs.

    Attributes:
        calls: the kernel on different inputs, together larger than the L2 cache.
        error: computes the relative error of a result against the reference.
    """

    calls: Sequence[Callable[[], object]]
    error: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Case:
    """A case to measure.

    Attributes:
        what: kernel, dtype and shape.
        prepare: makes the inputs.
        num_bytes: least bytes to move: inputs read once, outputs written once.
        num_flops: operations of products; a multiply-add counts two.
        flops_dtype: dtype whose ceiling applies.
        unit: unit of the figure: rate of bytes, rate of operations, or time of a call.
        max_error: largest relative error of a correct result.
        goal_id: id of the goal.
        goal_fraction: goal as a fraction of the floor.
        goal_rate: goal in `unit`, instead of a fraction.
        expected: expected figure on an H200.
        adds_up: whether reading and computing are separate parts of the work, whose floors add up.
        equal: what the earlier case with as many keys in rows of equal lengths is called; "" for none.
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
    expected: Expected | None = None
    adds_up: bool = False
    equal: str = ""

    def floor_s(self, ceilings: Ceilings) -> float:
        """Returns the least seconds of any kernel on this device."""
        flops = ceilings.flops.get(self.flops_dtype) or max(ceilings.flops.values())
        parts = (self.num_bytes / ceilings.bytes_per_s, self.num_flops / flops)
        return sum(parts) if self.adds_up else max(parts)

    def in_unit(self, seconds: float) -> float:
        """Converts a time of this case to its unit."""
        if self.unit == "us":
            return 1e6 * seconds
        return self.num_bytes / seconds / 1e9 if self.unit == "GB/s" else self.num_flops / seconds / 1e12


def run_case(case: Case, device: BenchDevice, ceilings: Ceilings, *, seconds: float) -> tuple[Result, Timing]:
    """Checks and times a case.

    Args:
        case: what to measure.
        device: device to measure on.
        ceilings: ceilings measured in the same run.
        seconds: approximate duration of the measurement.
    Raises: WrongResultError: the result is wrong; nothing was timed.
    """
    prepared = case.prepare()
    error = prepared.error()
    if not error <= case.max_error:  # NaN is wrong
        raise WrongResultError(f"{case.what}: relative error is {error:.3g}, must be at most {case.max_error:g}")
    timing = time_calls(prepared.calls, device.device, seconds=seconds)
    floor_s = case.floor_s(ceilings)
    goal_s = floor_s / case.goal_fraction if case.goal_fraction is not None else None
    goal = case.goal_rate if goal_s is None else case.in_unit(goal_s)
    notes = [f"{1e6 * timing.median_s:,.1f} us +-{50 * timing.spread:.1f} %", f"error {error:.1e}"]
    if timing.method == "events":
        notes.append("not captured in a graph: launch gaps included")
    direction: Direction = "at most" if case.unit == "us" else "at least"
    if case.expected is not None:
        notes.append(case.expected.note(case.in_unit(floor_s), case.unit, direction))
    figure = Result(
        benchmark_id=case.goal_id,
        what=case.what,
        figure=case.in_unit(timing.median_s),
        unit=case.unit,
        direction=direction,
        goal=goal,
        floor=case.in_unit(floor_s),
        note="; ".join(notes),
    )
    return figure, timing


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns norm(difference) / norm(expected) in float64; NaN if either contains one."""
    difference = actual.double() - expected.double()
    return float(difference.norm() / expected.double().norm())


def num_copies(device: BenchDevice, num_bytes: int, *, most: int = 64) -> int:
    """Returns the number of input sets of this size that together are four times the L2 cache."""
    return max(1, min(most, -(-4 * device.l2_bytes // num_bytes)))
