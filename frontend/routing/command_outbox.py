"""Commands of one Attach stream, collected until the writer comes: one message per kind and turn of the event loop.

Order within a turn: submissions, cancellations, credits, acknowledgement. A command never overtakes the submission it
refers to, and never outlives its request: its handle may be the next one's within the same turn.
"""

from collections.abc import Callable, Iterator

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.stream import CancelReason

# A message to the engine may have 16 MiB. One prompt of 2**20 tokens is 4 MiB.
_MAX_SUBMIT_BYTES = 4 << 20

_CANCEL_REASONS = {
    CancelReason.CLIENT: pb.CANCEL_REASON_CLIENT,
    CancelReason.STOP_TEXT: pb.CANCEL_REASON_STOP_TEXT,
    CancelReason.DEADLINE: pb.CANCEL_REASON_DEADLINE,
    CancelReason.STALLED: pb.CANCEL_REASON_STALLED,
}


class CommandOutbox:
    """What is to be sent next. Bounded by the requests that are open: each has at most one entry of each kind.

    Args:
        step_window: StepResults the engine sends without an acknowledgement.
        wake: called when there is something to send.
    """

    def __init__(self, *, step_window: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        # An acknowledgement goes along with other commands for free and alone when a quarter of the window is open.
        self._ack_every = max(1, step_window // 4)
        self._command_seq = 1  # Hello
        self._submissions: list[pb.Submission] = []
        self._cancels: dict[int, CancelReason] = {}  # by handle
        self._credits: dict[int, int] = {}
        self._processed_step = 0
        self._acknowledged_step = 0

    def submit(self, submission: pb.Submission) -> None:
        """Adds a new request."""
        self._submissions.append(submission)
        self._wake()

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Adds a request to stop."""
        self._cancels.setdefault(handle, reason)
        self._credits.pop(handle, None)
        self._wake()

    def grant(self, handle: int, num_tokens: int) -> None:
        """Adds credit for a request."""
        self._credits[handle] = self._credits.get(handle, 0) + num_tokens
        self._wake()

    def forget(self, handle: int) -> None:
        """Drops what was still to be said to a request that has ended."""
        self._cancels.pop(handle, None)
        self._credits.pop(handle, None)

    def acknowledge(self, step_seq: int) -> None:
        """Notes that all steps up to this one were processed."""
        self._processed_step = step_seq
        if step_seq - self._acknowledged_step >= self._ack_every:
            self._wake()

    def acknowledge_at_once(self) -> None:
        """From here on every step is acknowledged by itself: the engine stops as soon as it knows that all has come."""
        self._ack_every = 1
        self.acknowledge(self._processed_step)

    def take(self) -> list[pb.AttachRequest]:
        """Takes everything, as numbered messages in the order in which they must be sent."""
        return list(self._messages())

    def _messages(self) -> Iterator[pb.AttachRequest]:
        submissions, self._submissions = self._submissions, []
        for batch in _by_size(submissions):
            yield self._command(submit=pb.SubmitBatch(submissions=batch))
        cancels, self._cancels = self._cancels, {}
        for reason in dict.fromkeys(cancels.values()):
            handles = [handle for handle, its_reason in cancels.items() if its_reason is reason]
            yield self._command(cancel=pb.CancelBatch(handles=handles, reason=_CANCEL_REASONS[reason]))
        credits, self._credits = self._credits, {}  # noqa: A001 - the wire's word
        if credits:
            yield self._command(credit=pb.CreditGrant(handles=credits.keys(), tokens=credits.values()))
        if self._processed_step > self._acknowledged_step:
            self._acknowledged_step = self._processed_step
            yield self._command(ack=pb.StepAck(step_seq=self._processed_step))

    def _command(
        self,
        *,
        submit: pb.SubmitBatch | None = None,
        cancel: pb.CancelBatch | None = None,
        credit: pb.CreditGrant | None = None,
        ack: pb.StepAck | None = None,
    ) -> pb.AttachRequest:
        self._command_seq += 1
        return pb.AttachRequest(command_seq=self._command_seq, submit=submit, cancel=cancel, credit=credit, ack=ack)


def _by_size(submissions: list[pb.Submission]) -> Iterator[list[pb.Submission]]:
    batch: list[pb.Submission] = []
    size_bytes = 0
    for submission in submissions:
        submission_bytes = submission.ByteSize()
        if batch and size_bytes + submission_bytes > _MAX_SUBMIT_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(submission)
        size_bytes += submission_bytes
    if batch:
        yield batch
