"""The folder through which workers add up their metrics, as the parent tends it.

Every worker keeps its counters and histograms in files named after its index (prometheus_client's multi-process mode).
A replacement goes on with the files of the one it replaces, so that no total ever falls. Gauges die with their process.
"""

from pathlib import Path


def note_pid(folder: Path, index: int, pid: int) -> None:
    """A worker runs under this id."""
    _pid_file(folder, index).write_text(str(pid))


def clear_gauges(folder: Path, index: int) -> None:
    """A worker has ended: what it had in its queue is gone."""
    for path in (*folder.glob(f"gauge_live*_{index}.db"), _pid_file(folder, index)):
        path.unlink(missing_ok=True)


def pids(folder: Path) -> dict[int, int]:
    """The processes that run now, by index."""
    found = {}
    for path in folder.glob("worker-*.pid"):
        try:
            found[int(path.stem.removeprefix("worker-"))] = int(path.read_text())
        except (FileNotFoundError, ValueError):  # it has ended just now, or is being written
            continue
    return dict(sorted(found.items()))


def _pid_file(folder: Path, index: int) -> Path:
    return folder / f"worker-{index}.pid"
