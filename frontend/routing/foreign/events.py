"""Collects what an engine's calls report until the frontend reads it, as events of the engine protocol."""

import asyncio
from collections.abc import Sequence

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.logprobs import LogprobBatch


class EventBuffer:
    """Events to read next. All tokens that arrived since the last read form one step.

    Bounded by the credits of the requests: their calls are not read further without.
    """

    def __init__(self) -> None:
        self._wake = asyncio.Event()
        self._failure: Exception | None = None
        self._status: pb.EngineStatus | None = None
        self._rejections: list[pb.Rejection] = []
        self._step_seq = 0
        self._rows: list[tuple[int, int, int, Sequence[int], LogprobBatch | None]] = []
        self._prompts: list[pb.PromptLogprobs] = []
        self._first_tokens: list[pb.FirstToken] = []
        self._accounts: list[pb.TimeAccount] = []
        self._completions: list[pb.Completion] = []

    async def read(self) -> pb.AttachResponse:
        """Waits for an event and takes it.

        Raises:
            Exception: the error that `fail` was called with.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._rejections:
                rejections, self._rejections = self._rejections, []
                return pb.AttachResponse(admission=pb.AdmissionResult(rejections=rejections))
            if self._rows or self._completions or self._prompts:
                return pb.AttachResponse(step=self._step())
            if self._status is not None:
                status, self._status = self._status, None
                return pb.AttachResponse(status=status)
            self._wake.clear()
            await self._wake.wait()

    def fail(self, error: Exception) -> None:
        """Ends the attachment; events that were not read are dropped, like those in a broken connection."""
        self._failure = self._failure or error
        self._wake.set()

    def report(self, status: pb.EngineStatus) -> None:
        """Adds a status; an earlier one that was not read is outdated."""
        self._status = status
        self._wake.set()

    def reject(self, rejection: pb.Rejection) -> None:
        """Adds a rejection."""
        self._rejections.append(rejection)
        self._wake.set()

    def add_first_token(self, first: pb.FirstToken, account: pb.TimeAccount) -> None:
        """Adds the note of a first token; its row follows."""
        self._first_tokens.append(first)
        self._accounts.append(account)

    def add_prompt(self, prompt: pb.PromptLogprobs) -> None:
        """Adds log-probabilities of a prompt."""
        self._prompts.append(prompt)
        self._wake.set()

    def add_tokens(
        self, handle: int, epoch: int, start: int, token_ids: Sequence[int], logprobs: LogprobBatch | None
    ) -> None:
        """Adds tokens, of which `start` is the first one's index in the answer."""
        self._rows.append((handle, epoch, start, token_ids, logprobs))
        self._wake.set()

    def complete(self, completion: pb.Completion) -> None:
        """Adds the end of a request."""
        self._completions.append(completion)
        self._wake.set()

    def _step(self) -> pb.StepResult:
        self._step_seq += 1
        rows, self._rows = self._rows, []
        step = pb.StepResult(
            step_seq=self._step_seq,
            handles=[row[0] for row in rows],
            epochs=[row[1] for row in rows],
            start_indices=[row[2] for row in rows],
            token_counts=[len(row[3]) for row in rows],
            token_ids=[token_id for row in rows for token_id in row[3]],
            first_tokens=self._first_tokens,
            time_accounts=self._accounts,
            prompt_logprobs=self._prompts,
            completions=self._completions,
        )
        for number, (*_, logprobs) in enumerate(rows):
            if logprobs is not None:
                columns = step.logprobs
                columns.rows.append(number)
                columns.chosen.extend(logprobs.chosen)
                columns.top_widths.append(logprobs.top_width)
                columns.top_ids.extend(logprobs.top_ids)
                columns.top_values.extend(logprobs.top_values)
        self._first_tokens, self._accounts, self._prompts, self._completions = [], [], [], []
        return step
