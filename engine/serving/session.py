"""One frontend's stream: translates its commands to requests by id, and their outputs to rows by handle.

`server.py` reads and writes the messages, `outgoing.py` buffers them; scheduling is decided elsewhere.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from engine.constraints.constraint import Constraint, Matcher
from engine.core.deadlines import end_of_time
from engine.core.outputs import RequestOutput
from engine.core.request import Adapter, Request, RequestId
from engine.errors import EngineDraining, InvalidRequest, QueueFull, RequestError
from engine.interfaces import Cancel, GrantCredit, Inbox, LoopSnapshot, Submit
from engine.serving.adapters import EngineAdapters
from engine.serving.client_errors import CallRefused
from engine.serving.convert import RequestLimits, request_from_submission
from engine.serving.convert_constraint import constraint_from_submission
from engine.serving.matcher_compiler import MatcherCompiler
from engine.serving.outgoing import Receiver
from engine.serving.packing import rejection_message

# Poll interval of a reader that waits for capacity, which takes about a step to free up.
CAPACITY_POLL_S = 0.01

_CANCEL_REASONS = {pb.CANCEL_REASON_DEADLINE: EndReason.DEADLINE}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionContext:
    """State shared by all sessions.

    Attributes:
        max_open_requests: most open requests of all sessions together, and as many again that moved here from other
            engines. The scheduler's bound is lower; this one bounds the inbox while a step runs. Each session with open
            requests may always have an equal share of it, rounded up.
        request_ids: engine-wide, unique.
        owners: the session of every open request.
        grammars: compiles grammars.
        sessions: all attached sessions.
        adapters: adapters of requests.
    """

    inbox: Inbox
    limits: RequestLimits
    max_open_requests: int
    request_ids: Iterator[int]
    owners: "dict[RequestId, Session]"
    grammars: MatcherCompiler
    sessions: "Mapping[str, Session]"
    adapters: EngineAdapters


@dataclass(slots=True)
class OpenRequest:
    """A submission between its arrival and its terminal message.

    Attributes:
        adapter: the adapter that it uses, until it ends.
        compiling: set while its grammar compiles; the step loop does not know the request yet.
        grants: credit granted meanwhile.
    """

    request_id: RequestId
    handle: int
    epoch: int
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    adapter: Adapter | None = None
    is_accepted: bool = False
    compiling: "asyncio.Future[Constraint] | None" = None
    grants: list[int] = field(default_factory=list)


class Session:
    """State of one Attach stream after its handshake; lives on the event loop.

    Invariants: a handle is in `_by_handle` from the arrival of its submission until its Rejection or Completion has
    been given to `outgoing`; `_by_handle`, `_by_request` and this session's share of `owners` hold the same requests.
    """

    def __init__(
        self, session_id: str, context: SessionContext, outgoing: Receiver, last_command_seq: int, number: int
    ) -> None:
        self.session_id = session_id
        self._number = number  # names it to the scheduler
        self.outgoing = outgoing
        self._context = context
        self._received_seq = last_command_seq
        self._is_closing = False
        self._by_handle: dict[int, OpenRequest] = {}
        self._by_request: dict[RequestId, OpenRequest] = {}

    @property
    def num_open(self) -> int:
        """Requests without a terminal message."""
        return len(self._by_request)

    def handle(self, message: pb.AttachRequest) -> None:
        """Processes one command of the frontend.

        Raises: CallRefused: the frontend breaks the protocol.
        """
        if message.command_seq <= self._received_seq:
            raise _protocol_error(f"command_seq is {message.command_seq} after {self._received_seq}: it must increase")
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
                raise _protocol_error("second hello on one stream")
            case _:
                raise _protocol_error(f"command {message.command_seq} is of a kind that this engine does not know")

    async def wait_for_capacity(self) -> None:
        """Blocks the reader while the step loop or the receiver lags; HTTP/2 flow control then blocks the frontend."""
        while self.outgoing.is_full or self._context.inbox.is_full:  # noqa: ASYNC110 - see CAPACITY_POLL_S
            await asyncio.sleep(CAPACITY_POLL_S)

    def accept(self, request_id: RequestId) -> None:
        """Reports that the scheduler queued a request."""
        entry = self._by_request[request_id]
        entry.is_accepted = True
        self.outgoing.accept(entry.handle)

    def reject(self, request_id: RequestId, error: RequestError) -> None:
        """Reports that a request was rejected."""
        entry = self._close(request_id)
        self.outgoing.reject(rejection_message(entry.handle, entry.epoch, error))

    def add_output(self, output: RequestOutput, snapshot: LoopSnapshot, sampled_at_ns: int) -> None:
        """Adds the output of a step for one request."""
        entry = self._by_request[output.request_id] if output.completion is None else self._close(output.request_id)
        entry.num_output_tokens += len(output.token_ids)
        self.outgoing.add_output(entry.handle, entry.epoch, output, snapshot, sampled_at_ns)

    def end_all(self, reason: EndReason, detail: str) -> None:
        """Ends every open request without the step loop; those that it had not accepted are rejected."""
        for entry in list(self._by_handle.values()):
            self._close(entry.request_id)
            if entry.is_accepted:
                self._complete(entry, reason, detail)
            else:
                self.outgoing.reject(rejection_message(entry.handle, entry.epoch, EngineDraining(detail)))

    def close(self) -> None:
        """Ends the stream once everything is sent; rejects later submissions. Called when the step loop has ended."""
        self._is_closing = True
        self.outgoing.close()

    def abandon(self) -> int:
        """Cancels all open requests after the stream has ended, and returns their number."""
        request_ids = tuple(self._by_request)
        if request_ids:  # before the adapters are released
            self._context.inbox.put(Cancel(request_ids, EndReason.CANCELLED))
        for request_id in request_ids:
            self._close(request_id)
        return len(request_ids)

    def _submit(self, batch: pb.SubmitBatch) -> None:
        now_s = time.monotonic()
        requests: list[Request] = []
        for submission in batch.submissions:
            try:
                request = self._open(submission, now_s)
            except RequestError as error:
                self.outgoing.reject(rejection_message(submission.handle, submission.epoch, error))
                continue
            if submission.grammar:
                self._compile(request, submission)
            else:
                requests.append(request)
        if requests:
            self._context.inbox.put(Submit(tuple(requests)))

    def _open(self, submission: pb.Submission, now_s: float) -> Request:
        handle = submission.handle
        if handle == 0:
            raise InvalidRequest("handle is 0, must be at least 1")
        if handle in self._by_handle or self.outgoing.has_unsent_end(handle):
            raise InvalidRequest(f"handle {handle} is in use: its request has not ended")
        if self._is_closing:
            raise EngineDraining("the engine has stopped")
        self._check_capacity(has_moved=submission.epoch > 0)
        request_id = RequestId(next(self._context.request_ids))
        request = request_from_submission(submission, request_id, self._context.limits, now_s, self._number)
        if submission.adapter:
            request.adapter = self._context.adapters.acquire(submission.adapter, submission.adapter_sha256)
        entry = OpenRequest(
            request_id,
            handle,
            submission.epoch,
            now_s,
            len(request.prompt_ids),
            len(request.output_ids),
            request.adapter,
        )
        self._by_handle[handle] = self._by_request[request_id] = entry
        self._context.owners[request_id] = self
        return request

    def _check_capacity(self, *, has_moved: bool) -> None:
        """Raises QueueFull if the engine is at its bound and this session has its share of it."""
        num_open, most = len(self._context.owners), self._context.max_open_requests * (1 + has_moved)
        if num_open < most:
            return
        num_own = self.num_open
        num_sessions = sum(session.num_open > 0 for session in self._context.sessions.values()) + (not num_own)
        share = -(-most // num_sessions)
        if num_own >= share:
            raise QueueFull(
                f"the engine has {num_open} open requests, at most {most}; this frontend has {num_own}, its share is "
                f"{share}"
            )

    def _compile(self, request: Request, submission: pb.Submission) -> None:
        """Compiles the grammar of a request on another thread; the step loop gets the request afterwards.

        The request ends earlier if its deadline or time budget passes.
        """
        limits = self._context.limits

        def build(matcher: Matcher) -> Constraint:  # on a thread of the compiler
            constraint = constraint_from_submission(submission, limits.vocab_size, limits.end_token_ids, matcher)
            assert constraint is not None, "a grammar makes a constraint"
            constraint.accept(request.output_ids)
            if constraint.error:
                raise InvalidRequest(f"{constraint.error}, after {len(request.output_ids)} output_ids")
            return constraint

        entry = self._by_request[request.request_id]
        try:
            compiling = self._context.grammars.compile(submission.grammar, build)
        except QueueFull as error:
            self.reject(entry.request_id, error)
            return
        entry.compiling = asyncio.wrap_future(compiling)
        entry.compiling.add_done_callback(lambda compiled: self._hand_over(entry, request, compiled))
        if (end := end_of_time(request)) is not None:
            end_s, reason = end
            loop = asyncio.get_running_loop()
            timer = loop.call_later(end_s - time.monotonic(), self._end_compiling, entry, reason)
            entry.compiling.add_done_callback(lambda _: timer.cancel())

    def _hand_over(self, entry: OpenRequest, request: Request, compiled: "asyncio.Future[Constraint]") -> None:
        """Submits a request whose grammar has been compiled; rejects it if that failed."""
        error = None if compiled.cancelled() else compiled.exception()
        if self._by_request.get(entry.request_id) is not entry:
            return  # the request ended meanwhile
        entry.compiling = None
        if error is not None:
            if not isinstance(error, RequestError):
                _log.error("Compiling a grammar failed with an internal error", exc_info=error)
                error = InvalidRequest("grammar: internal error, see the engine's log")
            self.reject(entry.request_id, error)
            return
        request.constraint = compiled.result()
        inbox = self._context.inbox
        inbox.put(Submit((request,)))
        if entry.grants:
            grants = tuple((entry.request_id, tokens) for tokens in entry.grants)
            inbox.put(GrantCredit(grants))

    def _cancel(self, batch: pb.CancelBatch) -> None:
        entries = [self._by_handle[handle] for handle in dict.fromkeys(batch.handles) if handle in self._by_handle]
        reason = _CANCEL_REASONS.get(batch.reason, EndReason.CANCELLED)
        for entry in entries:
            if entry.compiling is not None:
                self._end_compiling(entry, reason)
        request_ids = tuple(entry.request_id for entry in entries)
        self._context.inbox.put(Cancel(request_ids, reason))

    def _end_compiling(self, entry: OpenRequest, reason: EndReason) -> None:
        """Ends a request whose grammar is being compiled."""
        if self._by_request.get(entry.request_id) is not entry:
            return  # the request ended in the same iteration of the event loop
        self._close(entry.request_id)
        self._complete(entry, reason, "", queued_s=time.monotonic() - entry.arrival_s)

    def _complete(self, entry: OpenRequest, reason: EndReason, detail: str, *, queued_s: float = 0.0) -> None:
        """Ends a request without the step loop."""
        self.outgoing.complete(
            pb.Completion(
                handle=entry.handle,
                epoch=entry.epoch,
                reason=f"COMPLETION_REASON_{reason.name}",
                num_prompt_tokens=entry.num_prompt_tokens,
                num_output_tokens=entry.num_output_tokens,
                queued_us=round(queued_s * 1e6),
                detail=detail,
            )
        )

    def _grant(self, grant: pb.CreditGrant) -> None:
        if len(grant.handles) != len(grant.tokens):
            raise _protocol_error(f"credit has {len(grant.handles)} handles and {len(grant.tokens)} tokens")
        grants: list[tuple[RequestId, int]] = []
        for handle, tokens in zip(grant.handles, grant.tokens, strict=True):
            entry = self._by_handle.get(handle)
            if entry is not None and entry.compiling is not None:
                entry.grants.append(tokens)
            elif entry is not None:
                grants.append((entry.request_id, tokens))
        self._context.inbox.put(GrantCredit(tuple(grants)))

    def _close(self, request_id: RequestId) -> OpenRequest:
        entry = self._by_request.pop(request_id)
        del self._by_handle[entry.handle]
        del self._context.owners[request_id]
        if entry.compiling is not None:
            entry.compiling.cancel()
        if entry.adapter is not None:
            self._context.adapters.release(entry.adapter)
        return entry


def _protocol_error(detail: str) -> CallRefused:
    return CallRefused(grpc.StatusCode.INVALID_ARGUMENT, detail)
