"""Frame of every benchmark on a GPU: opens the setting, measures and makes an outcome."""

import traceback
from collections.abc import Callable

from chairlift.bench.benchmark import BenchmarkError, Outcome, Settings
from engine.bench.gpu.setting import GpuSetting, open_setting
from kernels.bench.journal import Journal


def run_stage(settings: Settings, measure: Callable[[GpuSetting], None]) -> Outcome:
    """Opens the setting, measures into its journal, and makes an outcome of that.

    Raises: BenchmarkError: there is no GPU, or the figures are invalid.
    """
    setting = open_setting(settings)
    try:
        measure(setting)
    except BenchmarkError:
        raise
    except Exception:  # of the device or a library: what has been measured counts
        setting.journal.fail(traceback.format_exc())
    return outcome_of(setting.journal)


def outcome_of(journal: Journal) -> Outcome:
    """Converts a journal to an outcome for the command line."""
    return Outcome(
        results=tuple(journal.results),
        raw=journal.raw,
        text="\n".join(f"left out, --budget was used up: {line}" for line in journal.left_out),
        problems=tuple(journal.problems),
    )
