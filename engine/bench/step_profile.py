"""Profile of a step: the time of each kind of instruction, by size of step.

Claim: none; the profile shows where to optimise next.

Method: the mixed workload of the peers' comparison, served twice, the second time counted. A step is a recorded
program, and every instruction records the time at which it ended: the difference between neighbours is the duration of
an instruction, including the wait for other threads. Time outside the program (packing, sampling, scheduling) is a
separate part. Steps are grouped by their number of tokens; parts are means over a group's steps.
`--draw` draws the groups as bars.
"""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from chairlift.bench.report import Result
from chairlift.bench.workload import mixed_workload
from engine.bench.engine_options import add_engine_arguments, chosen_shape, describe, engine_config
from engine.bench.fresh_scheduler import serve_anew
from engine.bench.serve import engine
from engine.flags import DEFAULT_STEP_LIMITS
from kernels.cpu.instruction import OPCODE, Opcode
from kernels.cpu.worker_pool import Program, WorkerPool

if TYPE_CHECKING:
    import numpy.typing as npt

PARTS: dict[str, tuple[Opcode, ...]] = {
    "linear": (Opcode.LINEAR, Opcode.EXPERT_LINEAR, Opcode.ADAPT),
    "attention": (Opcode.PLAN_ATTENTION, Opcode.PAGED_ATTENTION),
    "packing and quantising": (Opcode.PACK_ROWS, Opcode.PACK_EXPERT_ROWS),
    "RoPE and KV write": (Opcode.ROTATE_AND_STORE,),
    "linear attention": (Opcode.CONVOLVE, Opcode.DELTA_RULE),
    "gate": (Opcode.GATE, Opcode.GATE_COLUMNS),
    "routing": (Opcode.ROUTE, Opcode.COMBINE, Opcode.ADD_SHARED),
    "norms, gathers and soft caps": (Opcode.RMS_NORM, Opcode.ADD_RMS_NORM, Opcode.GATHER_ROWS, Opcode.SOFT_CAP),
}
"""What the instructions of a step are called in the table: every opcode is in one of them."""

OUTSIDE = "outside the program"
_LARGEST = (10, 32, 64, 300)  # tokens of a group's largest step; the last group has no largest


@dataclass(frozen=True, slots=True)
class Group:
    """Steps of about one size.

    Attributes:
        name: such as "11 to 32 tokens".
        num_steps: how many there were.
        seconds: of the mean step, by part.
    """

    name: str
    num_steps: int
    seconds: dict[str, float]


class ProgramClock:
    """Records the duration of each part of every program."""

    def __init__(self) -> None:
        self._programs: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = []

    def take(self) -> list[dict[str, float]]:
        """Returns the seconds of every program since the last call, by part."""
        programs, self._programs = self._programs, []
        return [part_seconds(*program) for program in programs]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Records programs that run inside the block."""
        run = WorkerPool.run

        def run_noted(pool: WorkerPool, program: Program) -> None:
            run(pool, program)
            self._programs.append((program.instructions[:, OPCODE], pool.seconds_per_instruction()))

        with patch.object(WorkerPool, "run", run_noted):
            yield


def part_seconds(opcodes: "npt.NDArray[np.int64]", seconds: "npt.NDArray[np.float64]") -> dict[str, float]:
    """Sums a program's instructions by part; omits parts without any, such as routing in a dense model.

    Args:
        opcodes, seconds: [instructions].
    """
    chosen = {part: np.isin(opcodes, kinds) for part, kinds in PARTS.items()}
    return {part: float(seconds[of_part].sum()) for part, of_part in chosen.items() if of_part.any()}


def grouped(num_tokens: Sequence[int], parts: Sequence[dict[str, float]]) -> list[Group]:
    """Groups steps by their tokens, largest first; omits empty groups."""
    index = np.searchsorted(_LARGEST, num_tokens)
    groups = []
    for number in reversed(range(len(_LARGEST) + 1)):
        members = [parts[int(step)] for step in np.flatnonzero(index == number)]
        if members:
            seconds = {part: sum(member[part] for member in members) / len(members) for part in members[0]}
            groups.append(Group(_group_name(number), len(members), seconds))
    return groups


def _group_name(number: int) -> str:
    if number == len(_LARGEST):
        return f"over {_LARGEST[-1]} tokens"
    return f"{_LARGEST[number - 1] + 1 if number else 1} to {_LARGEST[number]} tokens"


def run(settings: Settings) -> Outcome:
    """Serves the workload and profiles its steps."""
    limits = DEFAULT_STEP_LIMITS["cpu"]
    workload = mixed_workload(8 if settings.quick else 64, vocab_size=chosen_shape(settings).vocab_size)
    parts = engine(
        engine_config(
            settings,
            max_num_seqs=64,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=1024,
        )
    )
    serve_anew(parts, workload)
    clock = ProgramClock()
    with clock.running():
        served = serve_anew(parts, workload)
    programs = clock.take()
    if len(programs) != len(served.steps):
        raise BenchmarkError(f"{len(programs)} programs ran in {len(served.steps)} steps")
    steps = [
        {**program, OUTSIDE: step.seconds - sum(program.values())}
        for program, step in zip(programs, served.steps, strict=True)
    ]
    groups = grouped([step.num_tokens for step in served.steps], steps)
    title = describe(settings)
    if settings.options.draw is not None:
        draw(groups, title, settings.options.draw)
    results = [
        Result(
            "profile",
            f"step of {group.name}",
            1e3 * sum(group.seconds.values()),
            "ms",
            note=f"{group.num_steps} steps; "
            + ", ".join(f"{part} {1e3 * seconds:.2f}" for part, seconds in group.seconds.items()),
        )
        for group in groups
    ]
    raw = {"num_tokens": [step.num_tokens for step in served.steps], "seconds": steps}
    return Outcome(tuple(results), raw, title)


def draw(groups: Sequence[Group], title: str, path: Path) -> None:
    """Draws one bar per group, as shares of its step, with milliseconds where there is room.

    Args:
        groups: from top to bottom.
        title: above the bars.
        path: .svg or .png; overwritten.
    Raises: BenchmarkError: matplotlib is missing or does not support the file type.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError(f"--draw needs matplotlib: pip install 'chairlift[loadgen]' ({error})") from error
    figure = Figure(figsize=(9, 0.9 + 0.5 * len(groups)), layout="constrained")
    axes = figure.subplots()
    names = [f"{group.name}: {1e3 * sum(group.seconds.values()):.1f} ms ({group.num_steps} steps)" for group in groups]
    begins = np.zeros(len(groups))
    for part in groups[0].seconds:
        shares = np.array([100 * group.seconds[part] / sum(group.seconds.values()) for group in groups])
        bars = axes.barh(names, shares, left=begins, label=part)
        labels = [
            f"{1e3 * group.seconds[part]:.1f}" if share > 4 else "" for group, share in zip(groups, shares, strict=True)
        ]
        axes.bar_label(bars, labels, label_type="center", fontsize=8)
        begins += shares
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="% of the step (numbers in ms)", title=title)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text
            figure.savefig(path)
    except ValueError as error:
        raise BenchmarkError(f"--draw {path}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    add_engine_arguments(parser, shape="135M")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="also draw the profile to this .svg or .png file")
