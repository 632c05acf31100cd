"""The folder of the workers' metrics files, maintained by the parent process.

Every worker keeps counters and histograms in files named after its index (prometheus_client's multi-process mode). A
replacement continues the files of its predecessor, so that totals never fall. Gauges are removed with their process.
"""

from pathlib import Path


def note_pid(folder: Path, index: int, pid: int) -> None:
    """Records a worker's process id."""
    _pid_file(folder, index).write_text(str(pid))


def clear_gauges(folder: Path, index: int) -> None:
    """Removes the gauges of a worker that has exited."""
    for path in (*folder.glob(f"gauge_live*_{index}.db"), _pid_file(folder, index)):
        path.unlink(missing_ok=True)


def pids(folder: Path) -> dict[int, int]:
    """Returns the process ids of running workers by index."""
    found = {}
    for path in folder.glob("worker-*.pid"):
        try:
            found[int(path.stem.removeprefix("worker-"))] = int(path.read_text())
        except (FileNotFoundError, ValueError):  # the worker just exited, or the file is being written
            continue
    return dict(sorted(found.items()))


def _pid_file(folder: Path, index: int) -> Path:
    return folder / f"worker-{index}.pid"
