"""A request that has not ended: its submission, and the stream of its output.

A later submission differs from the first only in the known tokens and the remaining time. Everything else stays the
same, in particular the seed, so that the answer continues as if no engine had been lost.
"""

import time
from collections.abc import Callable
from itertools import count

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID
from frontend.routing import wire
from frontend.routing.logprobs import PromptLogprobs
from frontend.routing.stream import CancelReason, RequestStream
from frontend.text.served_model import ModelKey
from frontend.types import EngineAccount

_numbers = count()


class PendingRequest:
    """A request that one engine or several in turn compute.

    Args:
        submission: the first submission, without handle and credit; this object owns it from now on.
        model: the model that an engine must serve to take the request.
        now_s: time.monotonic().
        window, coalesce, on_first_token, on_account: see RequestStream.

    Attributes:
        number: serial number; older requests have lower numbers.
        stream: the output.
        epoch: number of engines that took the request and were lost; rows with another number are outdated.
        num_prompt_tokens: number of tokens in the prompt.
        deadline_at_s, budget_end_s: values of time.monotonic(), or None.
        first_token_due_s: likewise; None: without a target.
    """

    def __init__(
        self,
        submission: pb.Submission,
        model: ModelKey,
        *,
        window: int,
        coalesce: bool = True,
        now_s: float,
        on_first_token: Callable[[], None] | None = None,
        on_account: Callable[[EngineAccount], None] | None = None,
    ) -> None:
        prompt_logprobs = None
        self.num_prompt_tokens = len(submission.prompt_ids) // BYTES_PER_TOKEN_ID
        if submission.HasField("prompt_logprobs"):
            prompt_logprobs = PromptLogprobs(
                top_width=submission.prompt_logprobs, num_prompt_tokens=self.num_prompt_tokens
            )
        stops = submission.stops
        self.number = next(_numbers)
        self.submission = submission
        self.model = model
        self.stream = RequestStream(
            window=window,
            max_tokens=stops.max_tokens,
            prompt_logprobs=prompt_logprobs,
            coalesce=coalesce,
            on_first_token=on_first_token,
            on_account=on_account,
        )
        self.epoch = 0
        self.deadline_at_s = now_s + submission.remaining_ms / 1000 if submission.HasField("remaining_ms") else None
        self.budget_end_s = now_s + stops.time_budget_ms / 1000 if stops.HasField("time_budget_ms") else None
        has_target = submission.HasField("ttft_remaining_ms")
        self.first_token_due_s = now_s + submission.ttft_remaining_ms / 1000 if has_target else None
        self._created_at_s = now_s
        self._is_outdated = False  # the submission: time has passed, and tokens may have come, since it was made

    def attach(
        self, handle: int, grant: Callable[[int], None], cancel: Callable[[CancelReason], None]
    ) -> pb.Submission:
        """Assigns the request to an engine; returns the submission to send.

        Args:
            handle: the request's id on the engine's stream.
            grant, cancel: see RequestStream.
        """
        submission, stream = self.submission, self.stream
        submission.handle = handle
        submission.token_credit = stream.attach(grant, cancel)
        if self._is_outdated:
            now_s = time.monotonic()
            wire.update_submission(
                submission,
                epoch=self.epoch,
                output_ids=stream.output_ids,
                waited_s=now_s - self._created_at_s,
                remaining_s=None if self.deadline_at_s is None else self.deadline_at_s - now_s,
                budget_s=None if self.budget_end_s is None else self.budget_end_s - now_s,
                ttft_s=None if self.first_token_due_s is None else self.first_token_due_s - now_s,
                has_prompt_logprobs=stream.prompt_logprobs is not None and not stream.prompt_logprobs.num_missing,
            )
        self._is_outdated = False
        return submission

    def detach(
        self, cancel: Callable[[CancelReason], None], *, was_taken: bool, heard_at_s: float | None = None
    ) -> None:
        """Notes that no engine has the request; see RequestStream."""
        self.stream.detach(cancel, was_taken=was_taken, heard_at_s=heard_at_s)
        self.epoch += was_taken
        self._is_outdated = True
