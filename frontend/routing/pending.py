"""One request as it can be submitted, and submitted again: the message, and the stream of what has come of it so far.

What a later submission says differs from the first one only in what has happened meanwhile: the tokens that are known,
the time that is left. Everything else, the seed before all, stays, so that the answer goes on as if nothing had been.
"""

import time
from itertools import count

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID
from frontend.errors import RequestError
from frontend.routing import wire
from frontend.routing.logprobs import PromptLogprobs
from frontend.routing.stream import RequestStream
from frontend.text.served_model import ModelKey

_numbers = count()


class PendingRequest:
    """A request on its way through one engine or several.

    Args:
        submission: the first one, without handle and credit; it is this object's from now on.
        model: only engines with this model can take it.
        window, coalesce: see RequestStream.

    Attributes:
        number: counts requests; who has the lower one was here first.
        engine: the engine that has it or had it last, by its name in the metrics; None: none ever had.
        deadline_at_s, budget_end_s: time.monotonic(); None: there is none.
        num_losses: engines lost in a row without an answer that got further; `failover.py` counts.
        num_kills: engines in a row that were killed from outside while they had it, likewise.
        goes_alone: has lost one together with other suspects.
        lost_at_index: tokens that were known at the last loss.
        instance_id: of the engine that has it or had it last.
        refused_by: instances that have not taken it, since it was last with one or had to pause.
        num_pauses: times that no engine would take it, since then.
        error: what it fails with if no engine takes it in time.
        wait_until_s: time.monotonic() until when an engine may still take it; 0: it has not had to wait yet.
        not_before_s: nor is it submitted again before this.
    """

    def __init__(
        self, submission: pb.Submission, model: ModelKey, *, window: int, coalesce: bool = True, now_s: float
    ) -> None:
        prompt_logprobs = None
        self.num_prompt_tokens = len(submission.prompt_ids) // BYTES_PER_TOKEN_ID
        if submission.HasField("prompt_logprobs"):
            prompt_logprobs = PromptLogprobs(
                top_width=submission.prompt_logprobs, num_prompt_tokens=self.num_prompt_tokens
            )
        self.number = next(_numbers)
        self._born_at_s = now_s
        self.submission = submission
        self.model = model
        self.stream = RequestStream(
            window=window,
            max_tokens=submission.stops.max_tokens,
            prompt_logprobs=prompt_logprobs,
            coalesce=coalesce,
        )
        self.engine: str | None = None
        self.deadline_at_s = now_s + submission.remaining_ms / 1000 if submission.HasField("remaining_ms") else None
        stops = submission.stops
        self.budget_end_s = now_s + stops.time_budget_ms / 1000 if stops.HasField("time_budget_ms") else None
        self.num_losses = 0
        self.num_kills = 0
        self.goes_alone = False
        self.lost_at_index = 0
        self.instance_id = ""
        self.refused_by: set[str] = set()
        self.num_pauses = 0
        self.error: RequestError | None = None
        self.wait_until_s = 0.0
        self.not_before_s = 0.0
        self._is_new = True

    def next_submission(self) -> pb.Submission:
        """What to send now, without handle and credit."""
        submission, stream = self.submission, self.stream
        if self._is_new:
            self._is_new = False
        else:
            now_s = time.monotonic()
            submission.epoch = stream.epoch
            submission.waited_ms = wire.remaining_ms(now_s - self._born_at_s)
            submission.output_ids = wire.ids_to_bytes(stream.output_ids)
            submission.start_index = len(stream.output_ids)
            if self.deadline_at_s is not None:
                submission.remaining_ms = wire.remaining_ms(self.deadline_at_s - now_s)
            if self.budget_end_s is not None:
                submission.stops.time_budget_ms = wire.budget_ms(self.budget_end_s - now_s)
            if stream.prompt_logprobs is not None and not stream.prompt_logprobs.num_missing:
                submission.ClearField("prompt_logprobs")
        return submission
