"""What a process of a group that monitors others hears of them."""

from enum import Enum, auto
from typing import Protocol

from engine.errors import EngineError


class News(Enum):
    """What a peer reports besides an error.

    READY: its shards are loaded. STOPPING: its machine was asked to stop, so the group should drain.
    """

    READY = auto()
    STOPPING = auto()


class Peer(Protocol):
    """A rank of this machine (`RankProcess`), or another machine with its ranks (`RemoteNode`).

    Attributes:
        name: for messages.
    """

    name: str

    def fileno(self) -> int:
        """The file descriptor to wait on for a report."""
        ...

    def send_bytes(self, message: bytes) -> None:
        """Sends a plan, or COLLECT; blocks while it is far behind. Raises: OSError: it is gone."""
        ...

    def receive(self) -> News | EngineError:
        """Waits for a report; an error is the last one.

        Raises: EOFError, OSError: it is gone, or sent something else.
        """
        ...

    def describe_end(self) -> str:
        """Returns how it has ended, in words that follow its name. Called after `receive` has failed."""
        ...

    def ask_to_leave(self, *, is_ready: bool) -> None:
        """Tells it that no more plans come. Args: is_ready: whether all peers have loaded."""
        ...

    def close(self) -> None:
        """Closes the connection."""
        ...
