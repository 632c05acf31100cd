"""A frontend's session inside the engine's process: what the calls of vLLM's API have in common.

The session is served and scheduled as one frontend's, but its messages go to the answers instead of a stream.
"""

# ruff: noqa: ARG002 - the arguments are those of `Receiver`

import itertools
from collections.abc import Callable

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from engine.core.outputs import RequestOutput
from engine.interfaces import LoopSnapshot
from engine.serving.outgoing import Receiver
from engine.serving.session import Session
from engine.serving.vllm.answer import Answer


class LocalSession(Receiver):
    """Submits answers and passes what becomes of them on; lives on the event loop.

    Args:
        open_session: opens the session of this receiver.
        on_close: called when the engine ends the session.

    Invariant: `_calls` holds the answers that the engine has, each with the call's wake-up.
    """

    def __init__(self, open_session: Callable[[Receiver], Session], on_close: Callable[[], None]) -> None:
        self._on_close = on_close
        self._handles = itertools.count(1)
        self._command_seqs = itertools.count(1)
        self._calls: dict[int, tuple[Answer, Callable[[], None]]] = {}
        self._session = open_session(self)

    async def submit(self, answer: Answer, submission: pb.Submission, wake: Callable[[], None]) -> None:
        """Submits an answer, once the engine takes commands.

        Args:
            answer: gets what becomes of it.
            submission: without its handle, which is set here.
            wake: called when there is news.
        """
        await self._session.wait_for_capacity()
        if not answer.is_open:
            return  # it was aborted meanwhile
        submission.handle = answer.handle = next(self._handles)
        self._calls[answer.handle] = (answer, wake)
        self._send(submit=pb.SubmitBatch(submissions=[submission]))

    def cancel(self, answer: Answer) -> None:
        """Stops an answer in the engine, which ends it unless it has ended."""
        if answer.handle in self._calls:
            self._send(cancel=pb.CancelBatch(handles=[answer.handle], reason=pb.CANCEL_REASON_CLIENT))

    def forget(self, answer: Answer) -> None:
        """Stops an answer in the engine, and drops what follows."""
        self.cancel(answer)
        self._calls.pop(answer.handle, None)

    def grant(self, answer: Answer, num_tokens: int) -> None:
        """Lets an answer grow by this many tokens."""
        if answer.handle in self._calls:
            self._send(credit=pb.CreditGrant(handles=[answer.handle], tokens=[num_tokens]))

    @property
    def is_full(self) -> bool:
        """See `Receiver`."""
        return False

    def accept(self, handle: int) -> None:
        """See `Receiver`. Calls have no message for it."""

    def reject(self, rejection: pb.Rejection) -> None:
        """See `Receiver`."""
        call = self._calls.pop(rejection.handle, None)
        if call is not None:
            answer, wake = call
            answer.reject(rejection)
            wake()

    def add_output(
        self, handle: int, epoch: int, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int
    ) -> None:
        """See `Receiver`."""
        call = self._calls.get(handle)
        if call is None:
            return
        answer, wake = call
        was_open = answer.is_open
        answer.add(output)
        if output.completion is not None:
            del self._calls[handle]
        elif was_open and not answer.is_open:  # by a stop text, of which the engine knows nothing
            self.forget(answer)
        wake()

    def end_step(self) -> None:
        """See `Receiver`. Every output has woken its call."""

    def complete(self, completion: pb.Completion) -> None:
        """See `Receiver`."""
        call = self._calls.pop(completion.handle, None)
        if call is not None:
            answer, wake = call
            name = pb.CompletionReason.Name(completion.reason).removeprefix("COMPLETION_REASON_")
            answer.finish(EndReason[name], completion.detail, completion.stop_token_id)
            wake()

    def has_unsent_end(self, handle: int) -> bool:
        """See `Receiver`."""
        return False

    def acknowledge(self, step_seq: int) -> None:
        """See `Receiver`. Calls acknowledge nothing."""

    def set_status(self, status: pb.EngineStatus) -> None:
        """See `Receiver`. Gateways ask for it."""

    def announce_drain(self, notice: pb.DrainNotice) -> None:
        """See `Receiver`. Gateways see it in the engine's health."""

    def close(self) -> None:
        """See `Receiver`."""
        self._on_close()

    def _send(self, **command: object) -> None:
        self._session.handle(pb.AttachRequest(command_seq=next(self._command_seqs), **command))  # type: ignore[arg-type]
