"""Metrics of several workers as one: prometheus_client's multi-process mode, and what that cannot do.

Each worker writes its values into memory-mapped files of its own, and whoever is asked reads the files of all. The
files are named after the worker, not after its process (`workers/metrics_folder.py` says why).
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import ProcessCollector, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from frontend.observability.metrics_folder import pids
from frontend.types import WorkerPlace

_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share_values(place: WorkerPlace) -> None:
    """From now on, every metric that is made in this process keeps its values in the folder."""
    os.environ[_FOLDER_VARIABLE] = str(place.metrics_folder)
    values.ValueClass = values.MultiProcessValue(lambda: place.index)  # type: ignore[no-untyped-call]


def shared_collectors(place: WorkerPlace) -> tuple[Collector, ...]:
    """What tells the values of all workers."""
    folder = place.metrics_folder
    shared = MultiProcessCollector(None, path=str(folder))  # type: ignore[no-untyped-call]
    return (shared, WorkerProcesses(folder))


class WorkerProcesses(Collector):
    """`process_*` of every worker that runs now, with the label `worker`: a sum would hide the one that is full.

    Args:
        folder: see `workers/metrics_folder.py`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """One family after the other, with every worker."""
        families: dict[str, Metric] = {}
        for index, pid in pids(self._folder).items():
            for metric in _process_metrics(pid):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {"worker": str(index)}, sample.value)
        yield from families.values()


def _process_metrics(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()
