"""One frontend's stream: its commands become requests by id, news by id become rows by handle.

It translates; it does not move messages (`engine/server.py`), keep them (`engine/outgoing.py`) or decide anything about
scheduling.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.commands import Cancel, GrantCredit, Inbox, Submit
from engine.convert import RequestLimits, request_from_submission
from engine.core.outputs import RequestOutput
from engine.core.request import FinishReason, Request, RequestId
from engine.errors import EngineDraining, InvalidRequest, QueueFull, RequestError
from engine.outgoing import Outgoing, StreamRefused
from engine.packing import rejection_message
from engine.reports import LoopSnapshot

# How often a held reader looks again. What it waits for lasts for steps and has no event.
ROOM_POLL_S = 0.01

_CANCEL_REASONS = {pb.CANCEL_REASON_DEADLINE: FinishReason.DEADLINE}


@dataclass(frozen=True, slots=True)
class SessionContext:
    """What sessions share.

    Attributes:
        max_open_requests: requests that all sessions together may have open. The scheduler's own bound comes first;
            this one bounds what waits in the inbox while a step runs.
        request_ids: engine-wide, never used twice.
        owners: the open requests of all sessions, and whose they are.
    """

    inbox: Inbox
    limits: RequestLimits
    max_open_requests: int
    request_ids: Iterator[int]
    owners: "dict[RequestId, Session]"


@dataclass(slots=True)
class OpenRequest:
    """A submission between its arrival and its terminal message."""

    request_id: RequestId
    handle: int
    epoch: int
    num_prompt_tokens: int
    num_output_tokens: int
    is_accepted: bool = False


class Session:
    """State of one Attach stream after its handshake; lives on the event loop.

    Invariants: a handle is in `_by_handle` from the arrival of its submission until its Rejection or Completion has
    been given to `outgoing`; `_by_handle`, `_by_request` and this session's share of `owners` hold the same requests.
    """

    def __init__(self, session_id: str, context: SessionContext, last_command_seq: int) -> None:
        self.session_id = session_id
        self.outgoing = Outgoing()
        self._context = context
        self._received_seq = last_command_seq
        self._is_closing = False
        self._by_handle: dict[int, OpenRequest] = {}
        self._by_request: dict[RequestId, OpenRequest] = {}

    def handle(self, message: pb.AttachRequest) -> None:
        """Takes one command of the frontend.

        Raises: StreamRefused: the frontend breaks the protocol.
        """
        if message.command_seq <= self._received_seq:
            raise _protocol_error(f"command_seq is {message.command_seq} after {self._received_seq}: it must grow")
        self._received_seq = message.command_seq
        match message.WhichOneof("command"):
            case "submit":
                self._submit(message.submit)
            case "cancel":
                self._cancel(message.cancel)
            case "credit":
                self._grant(message.credit)
            case "ack":
                self.outgoing.acknowledge(message.ack.step_seq)
            case "hello":
                raise _protocol_error("hello came twice on one stream")
            case _:
                raise _protocol_error(f"command {message.command_seq} holds no command that this engine knows")

    async def wait_for_room(self) -> None:
        """Holds the reader while the step loop or the receiver lags; HTTP/2 flow control then holds the frontend."""
        while self.outgoing.is_full or self._context.inbox.is_full:  # noqa: ASYNC110 - see ROOM_POLL_S
            await asyncio.sleep(ROOM_POLL_S)

    def accept(self, request_id: RequestId) -> None:
        """The scheduler has queued the request."""
        entry = self._by_request[request_id]
        entry.is_accepted = True
        self.outgoing.accept(entry.handle)

    def reject(self, request_id: RequestId, error: RequestError) -> None:
        """The scheduler has not."""
        entry = self._close(request_id)
        self.outgoing.reject(rejection_message(entry.handle, entry.epoch, error))

    def add_output(self, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int) -> None:
        """A step has news of one request."""
        entry = self._by_request[output.request_id] if output.completion is None else self._close(output.request_id)
        entry.num_output_tokens += len(output.token_ids)
        self.outgoing.add_output(entry.handle, entry.epoch, output, snapshot, sampled_at_ns)

    def end_all(self, reason: pb.CompletionReason, detail: str) -> None:
        """Ends every open request by decree: the step loop will say nothing more. What it had not accepted yet is
        rejected.
        """
        for entry in list(self._by_handle.values()):
            self._close(entry.request_id)
            if entry.is_accepted:
                self.outgoing.complete(
                    pb.Completion(
                        handle=entry.handle,
                        epoch=entry.epoch,
                        reason=reason,
                        num_prompt_tokens=entry.num_prompt_tokens,
                        num_output_tokens=entry.num_output_tokens,
                        detail=detail,
                    )
                )
            else:
                self.outgoing.reject(rejection_message(entry.handle, entry.epoch, EngineDraining(detail)))

    def close(self) -> None:
        """The step loop has ended: ends the stream once everything is sent; what is submitted meanwhile is rejected."""
        self._is_closing = True
        self.outgoing.close()

    def abandon(self) -> int:
        """The stream is gone: cancels what it has open.

        Returns: how many requests that were.
        """
        request_ids = tuple(self._by_request)
        for request_id in request_ids:
            self._close(request_id)
        if request_ids:
            self._context.inbox.put(Cancel(self.session_id, self._received_seq, request_ids, FinishReason.CANCELLED))
        return len(request_ids)

    def _submit(self, batch: pb.SubmitBatch) -> None:
        now_s = time.monotonic()
        requests: list[Request] = []
        for submission in batch.submissions:
            try:
                requests.append(self._open(submission, now_s))
            except RequestError as error:
                self.outgoing.reject(rejection_message(submission.handle, submission.epoch, error))
        if requests:
            self._context.inbox.put(Submit(self.session_id, self._received_seq, tuple(requests)))

    def _open(self, submission: pb.Submission, now_s: float) -> Request:
        handle = submission.handle
        if handle == 0:
            raise InvalidRequest("handle is 0: handles count from 1")
        if handle in self._by_handle or self.outgoing.has_unsent_end(handle):
            raise InvalidRequest(f"handle {handle} is in use until its request has ended")
        if self._is_closing:
            raise EngineDraining("the engine has stopped")
        num_open, most = len(self._context.owners), self._context.max_open_requests
        if num_open >= most:
            raise QueueFull(f"the engine holds {num_open} requests, at most {most}")
        request_id = RequestId(next(self._context.request_ids))
        request = request_from_submission(submission, request_id, self._context.limits, now_s)
        entry = OpenRequest(request_id, handle, submission.epoch, len(request.prompt_ids), len(request.output_ids))
        self._by_handle[handle] = self._by_request[request_id] = entry
        self._context.owners[request_id] = self
        return request

    def _cancel(self, batch: pb.CancelBatch) -> None:
        request_ids = tuple(self._by_handle[handle].request_id for handle in batch.handles if handle in self._by_handle)
        reason = _CANCEL_REASONS.get(batch.reason, FinishReason.CANCELLED)
        self._context.inbox.put(Cancel(self.session_id, self._received_seq, request_ids, reason))

    def _grant(self, grant: pb.CreditGrant) -> None:
        if len(grant.handles) != len(grant.tokens):
            raise _protocol_error(f"credit has {len(grant.handles)} handles and {len(grant.tokens)} tokens")
        grants = tuple(
            (self._by_handle[handle].request_id, tokens)
            for handle, tokens in zip(grant.handles, grant.tokens, strict=True)
            if handle in self._by_handle
        )
        self._context.inbox.put(GrantCredit(self.session_id, self._received_seq, grants))

    def _close(self, request_id: RequestId) -> OpenRequest:
        entry = self._by_request.pop(request_id)
        del self._by_handle[entry.handle]
        del self._context.owners[request_id]
        return entry


def _protocol_error(detail: str) -> StreamRefused:
    return StreamRefused(grpc.StatusCode.INVALID_ARGUMENT, detail)
