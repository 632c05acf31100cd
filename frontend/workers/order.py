"""The message that starts a worker, pickled on its standard input; that pipe closes when the parent ends."""

from dataclasses import dataclass

from frontend.config import FrontendConfig
from frontend.types import WorkerPlace


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """The settings of a worker.

    Attributes:
        config: the frontend's configuration, with the reserved ports.
        place: which worker this is.
    """

    config: FrontendConfig
    place: WorkerPlace
