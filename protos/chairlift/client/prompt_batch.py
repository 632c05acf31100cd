"""State of `generate_many`: which prompt to send when, and the outcomes in the order of the prompts.

Knows neither channels nor clocks: both clients drive it and pass the time in. A prompt that a busy server rejects (its
error says when to retry) keeps its place among those in flight until it is sent again, so that waiting prompts do not
add load to a full server.
"""

import heapq
import random
from collections.abc import Iterable, Sequence
from typing import TypedDict

from chairlift.client.errors import GenerationError
from chairlift.client.request import PROMPT_FORMS, ChatTurns, GenerationOptions, generation_spec
from chairlift.v1 import generation_service_pb2 as pb

Prompt = str | Sequence[int] | ChatTurns
"""Text, token ids, or the turns of a conversation."""

Params = GenerationOptions | Sequence[GenerationOptions] | None
"""Options of all prompts, or one set for each."""


class ManyOptions(TypedDict, total=False):
    """Further arguments of `generate_many`."""

    max_in_flight: int  # maximum number of prompts sent at once, 256 by default; more than the engine's slots fill it
    timeout_s: float | None  # deadline of each prompt's call, seconds; None: the server's
    progress: bool | None  # draw a progress bar; None: on a terminal, if tqdm is installed


_RETRY_FOR_S = 300.0
_RETRY_JITTER = 0.5


class PromptBatch:
    """The prompts of one `generate_many`.

    Invariant: every index is in exactly one of: not sent, in flight, waiting for a retry, settled.

    Args:
        prompts: text, token ids or chat turns each.
        params: options of all prompts, or one set for each.
        return_errors: an error takes the place of its answer; otherwise the first one is raised.
        max_in_flight: maximum number of prompts sent and not settled.
        timeout_s, progress: kept for the client; see ManyOptions.

    Raises:
        TypeError: a prompt or an option of the wrong type, or not as many params as prompts.
        ValueError: a number that its field cannot hold, or max_in_flight below 1.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        params: Params,
        *,
        return_errors: bool,
        max_in_flight: int = 256,
        timeout_s: float | None = None,
        progress: bool | None = None,
        **others: object,
    ) -> None:
        if others:
            raise TypeError(f"{', '.join(others)}: options of requests go into params, a dictionary")
        if max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}, it must be at least 1")
        self.requests = _requests(prompts, params)
        self.timeout_s = timeout_s
        self.progress = progress
        self.num_settled = 0
        self.num_output_tokens = 0
        self._max_in_flight = max_in_flight
        self._return_errors = return_errors
        self._outcomes: list[pb.GenerateResponse | GenerationError | None] = [None] * len(self.requests)
        self._num_sent = 0
        self._again: list[tuple[float, int]] = []  # (when, index), a heap
        self._first_refusal_s: dict[int, float] = {}

    @property
    def complete(self) -> bool:
        """Whether every prompt has an answer or an error."""
        return self.num_settled == len(self.requests)

    def take_due(self, now_s: float) -> list[int]:
        """Returns the indices of the prompts to send now, which are then in flight."""
        due = []
        while self._again and self._again[0][0] <= now_s:
            due.append(heapq.heappop(self._again)[1])
        num_new = min(self._max_in_flight - (self._num_sent - self.num_settled), len(self.requests) - self._num_sent)
        due += range(self._num_sent, self._num_sent + num_new)
        self._num_sent += num_new
        return due

    def wait_s(self, now_s: float) -> float | None:
        """Returns the seconds until the next retry; None if there is none to wait for."""
        return max(self._again[0][0] - now_s, 0.0) if self._again else None

    def answered(self, index: int, response: pb.GenerateResponse) -> None:
        """Records the answer to a prompt."""
        self.num_output_tokens += response.finished.usage.num_output_tokens
        self.num_output_tokens += sum(other.finished.usage.num_output_tokens for other in response.other_answers)
        self._settle(index, response)

    def failed(self, index: int, error: GenerationError, now_s: float) -> None:
        """Records an error, or schedules a retry if the server says when, for five minutes at most.

        A retry with a ticket comes exactly when the server said, because its slot is booked. If the server does not
        accept the ticket, which is too old after a pause of this process, the prompt is sent again without it.

        Raises:
            GenerationError: this error, unless errors are returned; its note says which prompt failed.
        """
        waited_s = now_s - self._first_refusal_s.setdefault(index, now_s)
        targets = self.requests[index].spec.latency_targets
        had_bad_ticket = bool(targets.retry_ticket) and any(
            violation.field == "spec.latency_targets.retry_ticket" for violation in error.field_violations
        )
        if (error.retry_delay_s is not None or had_bad_ticket) and waited_s < _RETRY_FOR_S:
            delay_s = error.retry_delay_s or 0.0
            if not error.retry_ticket:
                delay_s *= random.uniform(1.0, 1.0 + _RETRY_JITTER)
            if error.retry_ticket or targets.retry_ticket:
                self.requests[index].spec.latency_targets.retry_ticket = error.retry_ticket
            heapq.heappush(self._again, (now_s + delay_s, index))
        elif self._return_errors:
            self._settle(index, error)
        else:
            error.add_note(f"prompt {index} of {len(self.requests)}")
            raise error

    def outcomes(self) -> list[pb.GenerateResponse | GenerationError]:
        """Returns the outcomes in the prompts' order; call it when the batch is complete."""
        return [outcome for outcome in self._outcomes if outcome is not None]

    def _settle(self, index: int, outcome: pb.GenerateResponse | GenerationError) -> None:
        self._outcomes[index] = outcome
        self.num_settled += 1


def _requests(prompts: Iterable[Prompt], params: Params) -> list[pb.GenerateRequest]:
    if isinstance(prompts, str):
        raise TypeError("prompts is one string; give a list of prompts, or call generate")
    prompts = list(prompts)
    if params is None or isinstance(params, dict):
        options: Sequence[GenerationOptions] = [params or {}] * len(prompts)
    else:
        options = params
    if len(options) != len(prompts):
        raise TypeError(
            f"there are {len(prompts)} prompts and {len(options)} params; give one for each, or one for all"
        )
    return [_request(prompt, each) for prompt, each in zip(prompts, options, strict=True)]


def _request(prompt: Prompt, options: GenerationOptions) -> pb.GenerateRequest:
    for name in PROMPT_FORMS:
        if name in options:
            raise TypeError(f"params holds a prompt, {name!r}: prompts are the first argument")
    if isinstance(prompt, str):
        return pb.GenerateRequest(spec=generation_spec(prompt, options))
    own: GenerationOptions
    if all(isinstance(each, int) for each in prompt):
        own = {"token_ids": prompt}  # type: ignore[typeddict-item] # checked above
    else:
        own = {"chat": prompt}  # type: ignore[typeddict-item] # the remaining form
    return pb.GenerateRequest(spec=generation_spec(None, {**options, **own}))
