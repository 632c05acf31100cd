"""What a worker is told when it starts, pickled on its standard input. That pipe then stays open: its end means that
the parent has gone.
"""

from dataclasses import dataclass
from pathlib import Path

from frontend.config import FrontendConfig


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Which one of the workers this is.

    Attributes:
        index: counts from 0; a replacement has the index of the one it replaces.
        metrics_folder: where all workers keep their metrics.
        since: when the first of them was started, Unix seconds.
    """

    index: int
    metrics_folder: Path
    since: int


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """What to be.

    Attributes:
        config: with the ports that have been reserved.
        is_replacement: others are serving; open the ports when there is something to serve.
    """

    config: FrontendConfig
    place: WorkerPlace
    is_replacement: bool
