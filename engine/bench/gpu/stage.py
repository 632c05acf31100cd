"""From a setting to an outcome: what every benchmark on a GPU does around its measurements."""

from collections.abc import Callable

from chairlift.bench.benchmark import Outcome, Settings
from chairlift.bench.report import Result
from engine.bench.gpu.setting import GpuSetting, open_setting
from kernels.bench.figure import Figure, text_table
from kernels.bench.journal import Journal


def run_stage(settings: Settings, measure: Callable[[GpuSetting], None]) -> Outcome:
    """Opens the setting, measures into its journal, and makes an outcome of that.

    Raises: BenchmarkError: there is no GPU, or the figures would mean nothing.
    """
    setting = open_setting(settings)
    measure(setting)
    return outcome_of(setting.journal)


def outcome_of(journal: Journal) -> Outcome:
    """What a journal holds, as the command line prints it."""
    return Outcome(
        results=tuple(map(_result, journal.figures)),
        raw=journal.raw,
        text="\n".join(f"left out, the budget is spent: {line}" for line in journal.left_out),
        table=text_table(journal.figures),
        problems=tuple(journal.problems),
    )


def _result(figure: Figure) -> Result:
    return Result(
        benchmark_id=figure.goal_id,
        what=figure.what,
        figure=figure.measured,
        unit=figure.unit,
        goal=figure.goal,
        direction="at most" if figure.less_is_better else "at least",
        floor=figure.floor,
        note=figure.note,
    )
