"""One answer of a Generate call: what the engine has reported and the call has not sent yet."""

from dataclasses import dataclass, field

import grpc

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from engine.core.outputs import RequestOutput, TokenLogprobs
from engine.serving.client_errors import CallRefused
from engine.serving.vllm.stop_texts import StopTextMatcher

_FINISH_REASONS = {
    EndReason.END_TOKEN: "stop",
    EndReason.STOP_TOKEN: "stop",
    EndReason.MAX_TOKENS: "length",
    EndReason.CONTEXT_FULL: "length",
}
_FAILURES = {
    EndReason.CANCELLED: (grpc.StatusCode.UNAVAILABLE, "the engine stopped before the answer was complete"),
    EndReason.DEADLINE: (grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before the answer was complete"),
}
_REFUSALS = {
    pb.REJECTION_REASON_QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    pb.REJECTION_REASON_DRAINING: grpc.StatusCode.UNAVAILABLE,
}


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """How an answer ended.

    Attributes:
        finish_reason: "stop", "length" or "abort".
        matched_token_id, matched_text: the stop token or stop text that ended it.
    """

    finish_reason: str
    matched_token_id: int | None = None
    matched_text: str | None = None


@dataclass(slots=True)
class Unsent:
    """Tokens of an answer that wait to be sent."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Answer:
    """State of one answer; lives on the event loop.

    Attributes:
        index: its number in the call.
        handle: of its newest submission; 0: not submitted.
        is_due: whether the call must submit it.
        token_ids: all tokens so far.
        num_cached_tokens: prompt tokens from the prefix cache.
        end: how it ended, if it did.
        failure: the status that ends its call.

    Args:
        index: see above.
        stop_texts: None: there are none.
        min_tokens: tokens that end at no stop text. One that begins in them may end later.
        constraint_field: name of the field with the constraint, for errors.
    """

    def __init__(
        self, index: int, stop_texts: StopTextMatcher | None, min_tokens: int, constraint_field: str = "grammar"
    ) -> None:
        self.index = index
        self.handle = 0
        self.is_due = True
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.end: AnswerEnd | None = None
        self.failure: CallRefused | None = None
        self._unsent = Unsent()
        self._stop_texts = stop_texts
        self._min_tokens = min_tokens
        self._constraint_field = constraint_field
        self._is_aborted = False

    @property
    def is_open(self) -> bool:
        """Whether it has neither ended nor failed."""
        return self.end is None and self.failure is None

    @property
    def has_unsent_tokens(self) -> bool:
        """Whether there are tokens to send."""
        return bool(self._unsent.token_ids)

    def add(self, output: RequestOutput) -> None:
        """Adds the output of a step. What follows a stop text is dropped."""
        if not self.is_open:
            return
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._unsent.prompt_logprobs.extend(output.prompt_logprobs.tokens)
        self._add_tokens(output)
        if self.is_open and output.completion is not None:
            completion = output.completion
            self.finish(completion.reason, completion.detail, completion.stop_token_id)

    def finish(self, reason: EndReason, detail: str, stop_token_id: int | None = None) -> None:
        """Ends the answer as the engine did."""
        if not self.is_open:
            return
        if (finish_reason := _FINISH_REASONS.get(reason)) is not None:
            matched = stop_token_id if reason is EndReason.STOP_TOKEN else None
            self.end = AnswerEnd(finish_reason, matched_token_id=matched)
        elif reason is EndReason.CANCELLED and self._is_aborted:
            self.end = AnswerEnd("abort")
        else:
            code, told = _FAILURES.get(reason, (grpc.StatusCode.INTERNAL, f"the engine failed: {reason.name}"))
            self.failure = CallRefused(code, detail or told)

    def reject(self, rejection: pb.Rejection) -> None:
        """Fails the answer, which the engine has not accepted."""
        if not self.is_open:
            return
        if self._is_aborted:
            self.end = AnswerEnd("abort")
            return
        detail = rejection.detail
        if detail.startswith("grammar: "):
            detail = f"{self._constraint_field}: {detail.removeprefix('grammar: ')}"
        code = _REFUSALS.get(rejection.reason, grpc.StatusCode.INVALID_ARGUMENT)
        self.failure = CallRefused(code, detail)

    def reset(self) -> None:
        """Takes a rejection back: the answer will be submitted again, unless it was aborted meanwhile."""
        self.failure, self.handle = None, 0
        if self._is_aborted:
            self.abort()

    def abort(self) -> None:
        """Notes that the end to come is wanted; an answer that the engine does not have ends at once."""
        self._is_aborted = True
        if self.is_open and not self.handle:
            self.end = AnswerEnd("abort")

    def take(self) -> Unsent:
        """Returns what is to be sent, once."""
        unsent, self._unsent = self._unsent, Unsent()
        return unsent

    def _add_tokens(self, output: RequestOutput) -> None:
        assert output.start_index == len(self.token_ids) or not output.token_ids, "a step skipped or repeated a token"
        for position, token_id in enumerate(output.token_ids):
            self.token_ids.append(token_id)
            self._unsent.token_ids.append(token_id)
            if output.logprobs:
                self._unsent.logprobs.append(output.logprobs[position])
            if self._stop_texts is not None:
                matched = self._stop_texts.push(token_id, may_match=len(self.token_ids) > self._min_tokens)
                if matched is not None:
                    self.end = AnswerEnd("stop", matched_text=matched)
                    return
