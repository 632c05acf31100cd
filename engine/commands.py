"""What the IO thread asks of the step loop. Plain data: no socket and no protobuf crosses this line."""

from dataclasses import dataclass
from queue import Empty, SimpleQueue

from chairlift.service.end_reason import EndReason
from engine.core.request import Request, RequestId


@dataclass(frozen=True, slots=True)
class Submit:
    """New requests, already validated.

    Attributes:
        session_id: the stream they came by.
        command_seq: their number on that stream; comes back in `seen_commands` of the reports.
    """

    session_id: str
    command_seq: int
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Requests to stop. Unknown and finished ones are ignored."""

    session_id: str
    command_seq: int
    request_ids: tuple[RequestId, ...]
    reason: EndReason


@dataclass(frozen=True, slots=True)
class GrantCredit:
    """Tokens that requests may generate in addition: pairs of request and number."""

    session_id: str
    command_seq: int
    grants: tuple[tuple[RequestId, int], ...]


Command = Submit | Cancel | GrantCredit


class Inbox:
    """Commands on their way to the step loop: any thread puts, the step loop drains.

    It is bounded by its writers: a session stops reading its stream while `MAX_PENDING_COMMANDS` wait here, and HTTP/2
    flow control then holds the frontend. `SimpleQueue.put` is safe in a signal handler that interrupts `drain` on the
    same thread.
    """

    MAX_PENDING_COMMANDS = 1024

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | None] = SimpleQueue()

    @property
    def is_full(self) -> bool:
        """Whether writers should wait."""
        return self._queue.qsize() >= self.MAX_PENDING_COMMANDS

    def put(self, command: Command) -> None:
        """Adds a command; never blocks."""
        self._queue.put(command)

    def wake(self) -> None:
        """Ends a `drain` that waits, without a command."""
        self._queue.put(None)

    def drain(self, timeout_s: float) -> list[Command]:
        """Takes all that is there, in order.

        Args:
            timeout_s: how long to wait for something if nothing is there; 0 does not wait.
        Returns: the commands; empty after the timeout or a bare `wake`.
        """
        commands: list[Command] = []
        try:
            item = self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait()
            while True:
                if item is not None:
                    commands.append(item)
                item = self._queue.get_nowait()
        except Empty:
            return commands
