"""One request inside FakeEngine: a deterministic answer, one or more tokens per step."""

import sys
from array import array

from chairlift.engine.v1 import engine_service_pb2 as pb
from tests.support.frontend.byte_tokenizer import END_TOKEN_ID, VOCAB_SIZE

PROMPT_CHUNK = 16
"""Prompt tokens whose log-probabilities are in one message."""


def prompt_logprob(index: int) -> float:
    """Log-probability of prompt token `index`: no other of the same eight, so that a shift shows."""
    return -0.25 * (index % 8)


class FakeRequest:
    """One submission and how far its answer is: the prompt over and over, the end token after each round.

    Args:
        submission: as received.
        max_model_len: most tokens of prompt and answer.
        now_s: when it arrived.
    """

    def __init__(self, submission: pb.Submission, *, max_model_len: int, now_s: float) -> None:
        assert submission.stops.max_tokens >= 1, "max_tokens is always set"
        self.submission = submission
        self.credit: float = submission.token_credit or float("inf")
        self.cancelled = False
        self._max_model_len = max_model_len
        self._prompt_ids = _ids(submission.prompt_ids)
        has_deadline = submission.HasField("remaining_ms")
        self._deadline_s = now_s + submission.remaining_ms / 1000 if has_deadline else float("inf")
        has_budget = submission.stops.HasField("time_budget_ms")
        self._budget_end_s = now_s + submission.stops.time_budget_ms / 1000 if has_budget else float("inf")
        self._parked_since_s: float | None = None
        self._parked_s = 0.0
        self._num_output_tokens = 0
        self._started = False
        for token_id in _ids(submission.output_ids):  # the same answer, or it is nobody's
            assert token_id == self._next_token(), f"output {self._num_output_tokens} is {token_id}"
            self._num_output_tokens += 1
        assert self._num_output_tokens == submission.start_index, "start_index is the number of output_ids"

    def advance(self, step: pb.StepResult, max_tokens: int, now_s: float) -> None:
        """Adds up to `max_tokens` tokens of this request to a step, and its Completion if it ends."""
        start, token_ids = self._num_output_tokens, list[int]()
        reason = pb.COMPLETION_REASON_UNSPECIFIED
        if self.cancelled:
            reason = pb.COMPLETION_REASON_CANCELLED
        elif now_s >= min(self._deadline_s, self._budget_end_s):
            is_budget = self._budget_end_s <= self._deadline_s
            reason = pb.COMPLETION_REASON_TIME_BUDGET if is_budget else pb.COMPLETION_REASON_DEADLINE
        if self._num_output_tokens and not reason and not self._started:  # a continuation may have nothing left to do
            reason = self._stop_reason(self._last_token())
        was_parked = self._leave_parking(now_s)
        while not reason and len(token_ids) < max_tokens and self.credit > 0:
            token_ids.append(self._next_token())
            self._num_output_tokens += 1
            self.credit -= 1
            reason = self._stop_reason(token_ids[-1])
        if token_ids:
            if was_parked or not self._started:
                step.time_accounts.add(handle=self.submission.handle, epoch=self.submission.epoch, **self._times_us())
            self._add_row(step, start, token_ids)
        if self.credit <= 0:
            self._parked_since_s = now_s
        if reason:
            is_stop = reason in (pb.COMPLETION_REASON_END_TOKEN, pb.COMPLETION_REASON_STOP_TOKEN)
            step.completions.add(
                handle=self.submission.handle,
                epoch=self.submission.epoch,
                reason=reason,
                stop_token_id=self._last_token() if is_stop else 0,
                num_prompt_tokens=len(self._prompt_ids),
                num_cached_tokens=1,
                num_output_tokens=self._num_output_tokens,
                **self._times_us(),
            )

    @property
    def is_parked(self) -> bool:
        """Whether it waits for credit."""
        return self._parked_since_s is not None

    def _leave_parking(self, now_s: float) -> bool:
        """Counts the time since it was parked, if it was."""
        since_s, self._parked_since_s = self._parked_since_s, None
        if since_s is not None:
            self._parked_s += now_s - since_s
        return since_s is not None

    def _times_us(self) -> dict[str, int]:
        return {"queued_us": 1000, "prefill_us": 2000, "parked_us": round(self._parked_s * 1e6)}

    def _add_row(self, step: pb.StepResult, start: int, token_ids: list[int]) -> None:
        submission = self.submission
        if not self._started:
            self._started = True
            step.first_tokens.add(handle=submission.handle, epoch=submission.epoch, num_cached_tokens=1)
            if submission.HasField("prompt_logprobs"):
                self._add_prompt_logprobs(step, submission.prompt_logprobs)
        if submission.HasField("top_logprobs"):
            width = submission.top_logprobs
            step.logprobs.rows.append(len(step.handles))
            step.logprobs.top_widths.append(width)
            for token_id in token_ids:
                step.logprobs.chosen.append(-0.5)
                step.logprobs.top_ids.extend((token_id + rank) % VOCAB_SIZE for rank in range(width))
                step.logprobs.top_values.extend(-0.5 - rank for rank in range(width))
        step.handles.append(submission.handle)
        step.epochs.append(submission.epoch)
        step.start_indices.append(start)
        step.token_counts.append(len(token_ids))
        step.token_ids.extend(token_ids)

    def _add_prompt_logprobs(self, step: pb.StepResult, width: int) -> None:
        for start in range(1, len(self._prompt_ids), PROMPT_CHUNK):
            indices = range(start, min(start + PROMPT_CHUNK, len(self._prompt_ids)))
            step.prompt_logprobs.add(
                handle=self.submission.handle,
                epoch=self.submission.epoch,
                start_index=start,
                chosen=[prompt_logprob(index) for index in indices],
                top_width=width,
                top_ids=[(self._prompt_ids[index] + rank) % VOCAB_SIZE for index in indices for rank in range(width)],
                top_values=[prompt_logprob(index) - rank for index in indices for rank in range(width)],
            )

    def _last_token(self) -> int:
        self._num_output_tokens -= 1
        token_id = self._next_token()
        self._num_output_tokens += 1
        return token_id

    def _next_token(self) -> int:
        position = self._num_output_tokens % (len(self._prompt_ids) + 1)
        if position < len(self._prompt_ids):
            return self._prompt_ids[position]
        too_early = self._num_output_tokens < self.submission.stops.min_tokens
        return self._prompt_ids[0] if too_early else END_TOKEN_ID

    def _stop_reason(self, token_id: int) -> pb.CompletionReason:
        stops, num_tokens = self.submission.stops, self._num_output_tokens
        if token_id == END_TOKEN_ID and not stops.ignore_end_token:
            return pb.COMPLETION_REASON_END_TOKEN
        if token_id in stops.stop_token_ids and num_tokens > stops.min_tokens:
            return pb.COMPLETION_REASON_STOP_TOKEN
        if num_tokens >= stops.max_tokens:
            return pb.COMPLETION_REASON_MAX_TOKENS
        if num_tokens + len(self._prompt_ids) >= self._max_model_len:
            return pb.COMPLETION_REASON_CONTEXT_FULL
        return pb.COMPLETION_REASON_UNSPECIFIED


def _ids(data: bytes) -> list[int]:
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
