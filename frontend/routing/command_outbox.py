"""Collects the commands of one Attach stream until the writer takes them, as one message per kind and event loop turn.

Order within a turn: submissions, cancellations, credits, acknowledgement. A command never overtakes the submission it
refers to, and is dropped when its request ends: the handle may be reused within the same turn.
"""

from collections.abc import Callable, Iterator

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing import wire
from frontend.routing.stream import CancelReason


class CommandOutbox:
    """Commands to send next. Bounded, because each open request has at most one entry of each kind.

    Args:
        step_window: maximum number of unacknowledged StepResults.
        wake: called when there is something to send.
    """

    def __init__(self, *, step_window: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        # An acknowledgement is a message like any other: one is sent when a quarter of the window is unacknowledged.
        self._ack_every = max(1, step_window // 4)
        self._command_seq = 1  # Hello
        self._submissions: list[pb.Submission] = []
        self._unsent_handles: set[int] = set()  # handles of submissions that no message has yet
        self._cancellations: dict[int, CancelReason] = {}  # by handle
        self._credits: dict[int, int] = {}
        self._processed_step = 0
        self._acknowledged_step = 0

    def submit(self, submission: pb.Submission) -> None:
        """Adds a request."""
        self._submissions.append(submission)
        self._unsent_handles.add(submission.handle)
        self._wake()

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Adds a cancellation."""
        self._cancellations.setdefault(handle, reason)
        self._credits.pop(handle, None)
        self._wake()

    def grant(self, handle: int, num_tokens: int) -> None:
        """Adds credit for a request."""
        self._credits[handle] = self._credits.get(handle, 0) + num_tokens
        self._wake()

    def forget(self, handle: int) -> None:
        """Drops the commands for a request that has ended."""
        self._cancellations.pop(handle, None)
        self._credits.pop(handle, None)

    @property
    def unsent_handles(self) -> set[int]:
        """Stream request ids of submissions in no message that the iterator of `take` has returned."""
        return self._unsent_handles

    def acknowledge(self, step_seq: int) -> None:
        """Notes that all steps up to this one were processed."""
        self._processed_step = step_seq
        if self._is_ack_due:
            self._wake()

    def acknowledge_at_once(self) -> None:
        """Acknowledges every step at once from now on, because a draining engine waits for that of its last step."""
        self._ack_every = 1
        self.acknowledge(self._processed_step)

    def take(self) -> Iterator[pb.AttachRequest]:
        """Takes all commands, as numbered messages in sending order.

        Encodes each message only when the iterator reaches it, so that the event loop is not blocked by all of them.
        """
        ack = self._processed_step if self._is_ack_due else None
        commands = wire.commands(self._submissions, self._cancellations, self._credits, ack)
        self._submissions, self._cancellations, self._credits = [], {}, {}
        if ack is not None:
            self._acknowledged_step = ack
        return map(self._numbered, commands)

    @property
    def _is_ack_due(self) -> bool:
        return self._processed_step - self._acknowledged_step >= self._ack_every

    def _numbered(self, command: pb.AttachRequest) -> pb.AttachRequest:
        self._command_seq += 1
        command.command_seq = self._command_seq
        self._unsent_handles.difference_update(submission.handle for submission in command.submit.submissions)
        return command
