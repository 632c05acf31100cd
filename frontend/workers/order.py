"""What a worker is told when it starts, pickled on its standard input. That pipe then stays open: its end means that
the parent has gone.
"""

from dataclasses import dataclass

from frontend.config import FrontendConfig
from frontend.types import WorkerPlace


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
