"""Sums the metrics of several workers: prometheus_client's multi-process mode, and process metrics by worker.

Each worker writes its values to memory-mapped files, and the worker that is scraped reads the files of all. Files are
named after the worker's index, not its process id (see `metrics_folder.py`).
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
    """Makes all metrics that this process creates from now on keep their values in the folder."""
    os.environ[_FOLDER_VARIABLE] = str(place.metrics_folder)
    values.ValueClass = values.MultiProcessValue(lambda: place.index)  # type: ignore[no-untyped-call]


def shared_collectors(place: WorkerPlace) -> tuple[Collector, ...]:
    """Returns the collectors of all workers' metrics."""
    folder = place.metrics_folder
    shared = MultiProcessCollector(None, path=str(folder))  # type: ignore[no-untyped-call]
    return (shared, WorkerProcesses(folder))


class WorkerProcesses(Collector):
    """`process_*` metrics by the label `worker`: a sum would hide the worker that is at its limit.

    Args:
        folder: see `metrics_folder.py`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """Yields metric families with the samples of all workers."""
        families: dict[str, Metric] = {}
        for index, pid in pids(self._folder).items():
            for metric in _process_metrics(pid):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    family.add_sample(sample.name, {"worker": str(index)}, sample.value)
        yield from families.values()


def _process_metrics(pid: int) -> Iterable[Metric]:
    return ProcessCollector(pid=lambda: pid, registry=None).collect()
