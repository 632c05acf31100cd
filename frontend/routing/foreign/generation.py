"""One request in an engine of another project: runs its Generate call and checks what the engine sends."""

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from typing import Protocol

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID
from frontend.routing import wire
from frontend.routing.foreign.continuation import Continuation, UnsupportedError, continuation_of, finished_reason
from frontend.routing.foreign.dialect import Dialect, DialectError, Part, PartEnd
from frontend.routing.foreign.events import EventBuffer
from frontend.routing.logprobs import LOWEST, LogprobBatch

logger = logging.getLogger(__name__)

_STOPPED = frozenset({"stop", "stop_word", "end_id", "tool_calls"})
_DROPPED = frozenset({"abort", "cancelled", "timeout", "not_finished"})
_FAILED = "error"
_REFUSED = frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND})
_GONE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED})


class Host(Protocol):
    """What a generation needs of its attachment.

    Attributes:
        dialect: the engine.
        events: where everything is reported.
        info: the engine's limits.
    """

    dialect: Dialect
    events: EventBuffer
    info: pb.EngineInfo

    async def is_alive(self) -> bool:
        """Asks whether the engine is healthy; reports its loss if it is not."""
        ...

    def note_message(self) -> None:
        """Notes that the engine has sent something."""

    def warn(self, cause: str, message: str) -> None:
        """Logs a problem of the engine; each cause once."""

    def abort(self, request_id: str) -> None:
        """Tells the engine to drop a request."""


class Generation:
    """One request. Reports exactly one end, unless the engine is lost.

    Args:
        host: the attachment.
        submission: the request; owned by this object.
        request_id: its name in the engine.

    Attributes:
        has_ended: whether its end has been reported.
    """

    def __init__(self, host: Host, submission: pb.Submission, request_id: str) -> None:
        self._host = host
        self._submission = submission
        self._request_id = request_id
        self._rest: Continuation | None = None
        self._received = array("I")  # from this engine, replayed ones included
        self._num_tokens = submission.start_index  # of the answer, as the frontend knows it
        self._credit = submission.token_credit or 1 << 62
        self._has_credit = asyncio.Event()
        self.has_ended = False
        self._began_at_s = time.monotonic()
        self._first_token_at_s: float | None = None
        self._has_prompt_logprobs = not submission.HasField("prompt_logprobs")
        self._task: asyncio.Task[None] | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for the engine, not for credit."""
        return not self.has_ended and not self._needs_credit

    @property
    def _needs_credit(self) -> bool:
        """Whether it must not read further. Behind the last token only the end is left, which no credit is for."""
        return self._credit <= 0 and self._num_tokens < self._submission.stops.max_tokens

    def start(self) -> asyncio.Task[None]:
        """Starts the call."""
        self._task = asyncio.create_task(self._run(), name="foreign-generation")
        return self._task

    def grant(self, num_tokens: int) -> None:
        """Adds credit."""
        self._credit += num_tokens
        self._has_credit.set()

    def cancel(self, reason: pb.CancelReason) -> None:
        """Cancels the request for the frontend."""
        is_late = reason == pb.CANCEL_REASON_DEADLINE
        self._cut(pb.COMPLETION_REASON_DEADLINE if is_late else pb.COMPLETION_REASON_CANCELLED)

    def close(self) -> None:
        """Ends the call without a report, because the attachment ends."""
        self.has_ended = True
        if self._task is not None:
            self._task.cancel()

    def _cut(self, reason: pb.CompletionReason) -> None:
        """Ends the request before the engine does."""
        if self.has_ended:
            return
        self._complete(reason)
        self._host.abort(self._request_id)
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        submission, info, dialect = self._submission, self._host.info, self._host.dialect
        reason = finished_reason(submission, info.end_token_ids, info.max_model_len)
        if reason is not None:
            self._received = wire.ids_from_bytes(submission.output_ids)
            self._complete(reason)
            return
        if submission.HasField("remaining_ms") and not submission.remaining_ms:
            self._complete(pb.COMPLETION_REASON_DEADLINE)
            return
        try:
            self._rest = continuation_of(submission)
            message = dialect.request(self._request_id, submission, self._rest)
        except (UnsupportedError, ValueError) as error:
            self._reject(pb.REJECTION_REASON_INVALID, str(error))
            return
        timer: asyncio.TimerHandle | None = None
        if submission.stops.HasField("time_budget_ms"):
            timer = asyncio.get_running_loop().call_later(
                submission.stops.time_budget_ms / 1000, self._cut, pb.COMPLETION_REASON_TIME_BUDGET
            )
        call = dialect.generate(message, submission.remaining_ms / 1000 if submission.remaining_ms else None)
        try:
            async for response in call:
                self._host.note_message()
                part = dialect.part(response, submission.top_logprobs, submission.prompt_logprobs)
                if part is None:
                    self._host.warn("unknown", "sent a response that this version does not know; ignored")
                    continue
                self._take(part, self._rest)
                if self.has_ended:
                    return
                while self._needs_credit:
                    self._has_credit.clear()
                    await self._has_credit.wait()
            self._drop("ended a stream before the answer had ended")
        except grpc.aio.AioRpcError as error:
            await self._end_with(error)
        except DialectError as error:
            self._fault(str(error))
        except asyncio.CancelledError:
            if not self.has_ended:  # gRPC's, of a call that the engine's side cancelled
                self._drop("cancelled a stream")
            raise
        except Exception as error:  # a defect here must not leave the request open
            logger.exception("a response of the engine cannot be processed")
            self._fault(f"a response cannot be processed: {error!r}")
        finally:
            if timer is not None:
                timer.cancel()
            call.cancel()

    # What the engine sends.

    def _take(self, part: Part, rest: Continuation) -> None:
        if part.index:
            raise DialectError(f"the engine sent answer {part.index + 1} of 1")
        if part.num_prompt_tokens and part.num_prompt_tokens != len(rest.prompt_ids):
            raise DialectError(
                f"the engine read {part.num_prompt_tokens} prompt tokens, it was sent {len(rest.prompt_ids)}"
            )
        if part.prompt_logprobs is not None and not self._has_prompt_logprobs:
            self._has_prompt_logprobs = True
            self._add_prompt(part.prompt_logprobs)
        if part.token_ids:
            self._add_tokens(part.token_ids, part.logprobs, part.num_cached_tokens, rest)
        if part.end is not None and not self.has_ended:
            self._finish(part.end, rest)

    def _add_prompt(self, columns: LogprobBatch) -> None:
        submission = self._submission
        num_tokens, num_prompt = len(columns.chosen) + 1, len(submission.prompt_ids) // BYTES_PER_TOKEN_ID
        if num_tokens != num_prompt:
            raise DialectError(f"log-probabilities of {num_tokens} prompt tokens, it was sent {num_prompt}")
        self._host.events.add_prompt(
            pb.PromptLogprobs(
                handle=submission.handle,
                epoch=submission.epoch,
                start_index=1,
                chosen=columns.chosen,
                top_width=columns.top_width,
                top_ids=columns.top_ids,
                top_values=columns.top_values,
            )
        )

    def _add_tokens(
        self, token_ids: Sequence[int], logprobs: LogprobBatch | None, num_cached_tokens: int, rest: Continuation
    ) -> None:
        """Passes on new tokens, up to max_tokens."""
        submission = self._submission
        if logprobs is None and submission.HasField("top_logprobs"):
            raise DialectError("the engine sent no log-probabilities")
        num_before = len(self._received)
        self._received.extend(token_ids)
        num_replayed = min(max(len(rest.replayed_ids) - num_before, 0), len(token_ids))
        for index in range(num_before, num_before + num_replayed):
            if self._received[index] != rest.replayed_ids[index]:
                raise DialectError(
                    f"the answer cannot be continued: this engine generates other tokens, from token {index} on"
                )
        num_left = submission.stops.max_tokens - self._num_tokens
        new = token_ids[num_replayed : num_replayed + num_left]
        if len(new) < len(token_ids) - num_replayed:
            del self._received[num_before + num_replayed + len(new) :]
        if new:
            if self._first_token_at_s is None:
                self._note_first_token(num_cached_tokens)
            columns = None
            if logprobs is not None and submission.HasField("top_logprobs"):
                columns = logprobs.cut(num_replayed, num_replayed + len(new))
            self._host.events.add_tokens(submission.handle, submission.epoch, self._num_tokens, new, columns)
            self._num_tokens += len(new)
            self._credit -= len(new)
        if len(new) < len(token_ids) - num_replayed:
            self._host.warn("too many", "sent more tokens than max_tokens; they are dropped")
            self._cut(pb.COMPLETION_REASON_MAX_TOKENS)

    def _note_first_token(self, num_cached_tokens: int) -> None:
        submission = self._submission
        self._first_token_at_s = time.monotonic()
        names = {"handle": submission.handle, "epoch": submission.epoch}
        num_prompt = len(submission.prompt_ids) // BYTES_PER_TOKEN_ID
        self._host.events.add_first_token(
            pb.FirstToken(num_cached_tokens=min(num_cached_tokens, num_prompt), **names),
            pb.TimeAccount(prefill_us=_us(self._first_token_at_s - self._began_at_s), **names),
        )

    def _finish(self, end: PartEnd, rest: Continuation) -> None:
        self._add_unstreamed(end.output_ids, rest)
        if end.reason in _DROPPED or (end.reason == _FAILED and self._first_token_at_s is not None):
            self._drop(f'ended an answer with "{end.reason}"')
            return
        if end.reason == _FAILED:
            raise DialectError("the engine failed this request; its log says why")
        if len(self._received) < len(rest.replayed_ids):
            raise DialectError(
                f"the answer cannot be continued: this engine ends it after {len(self._received)} of "
                f"{len(rest.replayed_ids)} tokens"
            )
        stops, info = self._submission.stops, self._host.info
        if end.reason in _STOPPED:
            self._finish_stopped(end, rest)
        elif end.reason == "length":
            if self._num_tokens >= stops.max_tokens:
                self._complete(pb.COMPLETION_REASON_MAX_TOKENS)
                return
            num_tokens = len(self._submission.prompt_ids) // BYTES_PER_TOKEN_ID + self._num_tokens
            if num_tokens < info.max_model_len:
                self._host.warn(
                    "context", f"ended an answer for length at {num_tokens} tokens, it reports {info.max_model_len}"
                )
            self._complete(pb.COMPLETION_REASON_CONTEXT_FULL)
        else:
            raise DialectError(f'the engine ended the answer with the unknown reason "{end.reason}"')

    def _add_unstreamed(self, listed: Sequence[int], rest: Continuation) -> None:
        """Checks the tokens that the last message lists again, and adds those that were not streamed."""
        received = self._received.tolist()
        if not listed or list(listed) == received[-len(listed) :]:
            return
        if list(listed[: len(received)]) != received:
            raise DialectError("the engine ended the answer with other tokens than it sent")
        self._add_tokens(listed[len(received) :], None, 0, rest)

    def _finish_stopped(self, end: PartEnd, rest: Continuation) -> None:
        stop_ids, end_ids = self._submission.stops.stop_token_ids, self._host.info.end_token_ids
        matched, last = end.matched_token_id, self._received[-1] if self._received else None
        if matched is not None and matched != last and (matched in stop_ids or matched in end_ids):
            self._add_end_token(matched, rest)  # generated, but left out
            last = matched
        if last in stop_ids:
            self._complete(pb.COMPLETION_REASON_STOP_TOKEN)
            return
        is_end = last in end_ids or (matched == last and not self._submission.grammar) or not end_ids
        if last is None or not is_end:  # the grammar allows nothing but an end token, and the engine spared it
            if not end_ids or self._num_tokens >= self._submission.stops.max_tokens:
                self._complete(pb.COMPLETION_REASON_MAX_TOKENS)
                return
            self._add_end_token(end_ids[0], rest)
        self._complete(pb.COMPLETION_REASON_END_TOKEN)

    def _add_end_token(self, token_id: int, rest: Continuation) -> None:
        """Adds a token that the engine did not send, as certain: its log-probability is not known."""
        width = self._submission.top_logprobs
        top_ids = [token_id, *(other for other in range(width) if other != token_id)][:width]
        top_values = [0.0 if top_id == token_id else LOWEST for top_id in top_ids]
        self._add_tokens([token_id], LogprobBatch(width, [0.0], top_ids, top_values), 0, rest)

    # Ends.

    async def _end_with(self, error: grpc.aio.AioRpcError) -> None:
        code, detail = error.code(), error.details() or error.code().name
        if self.has_ended:
            return
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self._complete(pb.COMPLETION_REASON_DEADLINE)
        elif code in _REFUSED and not self._received:
            self._reject(pb.REJECTION_REASON_INVALID, f"the engine refuses this request: {detail}")
        elif code is grpc.StatusCode.RESOURCE_EXHAUSTED and not self._received:
            self._reject(pb.REJECTION_REASON_QUEUE_FULL, detail)
        elif not await self._host.is_alive() or self.has_ended:
            return
        elif code in _GONE:
            self._drop(f"ended a stream with {code.name}: {detail}")
        else:
            self._fault(f"{code.name}: {detail}")

    def _drop(self, what: str) -> None:
        """The engine gave the request up: another one, or this one, continues it."""
        self._host.warn("dropped", f"{what}; its request continues elsewhere")
        if self._first_token_at_s is not None:
            self._complete(pb.COMPLETION_REASON_CANCELLED)
        else:  # rejected, since it made no progress: it is tried again with pauses, up to a timeout
            self._reject(pb.REJECTION_REASON_DRAINING, f"the engine {what}")

    def _fault(self, detail: str) -> None:
        if not self.has_ended:
            self._complete(pb.COMPLETION_REASON_ENGINE_ERROR, detail)
            self._host.abort(self._request_id)

    def _reject(self, reason: pb.RejectionReason, detail: str) -> None:
        if self.has_ended:
            return
        self.has_ended = True
        submission = self._submission
        self._host.events.reject(
            pb.Rejection(handle=submission.handle, epoch=submission.epoch, reason=reason, detail=detail)
        )

    def _complete(self, reason: pb.CompletionReason, detail: str = "") -> None:
        if self.has_ended:  # by a token beyond max_tokens, which the engine's last message added
            return
        self.has_ended = True
        submission, now_s = self._submission, time.monotonic()
        first_s = now_s if self._first_token_at_s is None else self._first_token_at_s
        is_stop = reason == pb.COMPLETION_REASON_STOP_TOKEN
        self._host.events.complete(
            pb.Completion(
                handle=submission.handle,
                epoch=submission.epoch,
                reason=reason,
                stop_token_id=self._received[-1] if is_stop else 0,
                num_prompt_tokens=len(submission.prompt_ids) // BYTES_PER_TOKEN_ID,
                num_output_tokens=self._num_tokens,
                prefill_us=_us(first_s - self._began_at_s),
                decode_us=_us(now_s - first_s),
                detail=detail,
            )
        )


def _us(seconds: float) -> int:
    return max(round(seconds * 1e6), 0)
