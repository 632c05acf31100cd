"""Another machine of the group, from the side of node 0, and the reports that it sends: JSON, unlike a rank's messages.

Node 0 has one connection to each other machine, which passes plans on to its ranks (`engine.startup.node`).
"""

import contextlib
import json

from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError, StepError
from engine.parallel.nodes import NodeLink
from engine.parallel.peer import News
from engine.parallel.plans import LEAVE

READY = b'{"ready": true}'
"""Report: the ranks of this machine have loaded their shards."""

STOPPING = b'{"stopping": true}'
"""Report: this machine was asked to stop, so the group should drain."""

_NEWS = {READY: News.READY, STOPPING: News.STOPPING}
_ERRORS = {kind.__name__: kind for kind in (CheckpointError, ConfigError, DeviceError, StepError)}


def error_report(error: EngineError) -> bytes:
    """Returns the report of an error that ends a machine's ranks."""
    kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind) or kind is StepError)
    return json.dumps({"error": kind, "text": str(error)}).encode()


class RemoteNode:
    """Implements `Peer`.

    Attributes:
        name: number and address of the node.
    """

    def __init__(self, link: NodeLink) -> None:
        self._link = link
        self.name = link.name

    def fileno(self) -> int:
        """The connection's file descriptor."""
        return self._link.fileno()

    def send_bytes(self, message: bytes) -> None:
        """See `Peer`."""
        self._link.send_bytes(message)

    def receive(self) -> News | EngineError:
        """See `Peer`."""
        report = self._link.recv_bytes()
        if (news := _NEWS.get(report)) is not None:
            return news
        try:
            fields = json.loads(report)
            return _ERRORS[fields["error"]](str(fields["text"]))
        except (ValueError, KeyError, TypeError):
            raise OSError("no report of a node") from None

    def describe_end(self) -> str:
        """See `Peer`."""
        return "has left the group, or cannot be reached any more"

    def ask_to_leave(self, *, is_ready: bool) -> None:  # noqa: ARG002 - the node knows about its ranks
        """See `Peer`."""
        with contextlib.suppress(OSError):
            self._link.send_bytes(LEAVE)

    def close(self) -> None:
        """Closes the connection."""
        self._link.close()
