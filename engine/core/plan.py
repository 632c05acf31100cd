"""Builds the plan of a step."""

from collections.abc import Sequence

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, Request, RequestId
from engine.core.state_snapshots import SavedState


class PlanBuilder:
    """Rows and remaining budget of one step; updates the progress of their requests.

    Logits have a separate budget: `max_num_seqs` positions, one per sampling row. Log-probabilities of prompts use what
    sampling rows leave, so that they need no memory beyond a full batch's. A row that would sample beyond the budget
    ends before its last token and samples in the next step.

    Invariants: budget left + tokens in rows == max_num_batched_tokens; logits left + logits of rows == max_num_logits;
    a request has at most one row.

    Attributes:
        budget: tokens that the step may still take.
        num_tokens: tokens of its rows.
        may_admit: whether requests may still be admitted: all that run have the blocks that they need.
        saves: requests whose state is to be copied before their rows, with the tokens that they have computed.
    """

    __slots__ = (
        "_narrow", "_narrow_requests", "_new_requests", "_num_logits_left", "_wide", "_wide_requests", "budget",
        "may_admit", "num_tokens", "saves",
    )  # fmt: skip

    def __init__(self, max_num_batched_tokens: int, max_num_logits: int) -> None:
        self.budget = max_num_batched_tokens
        self._num_logits_left = max_num_logits
        self.num_tokens = 0
        self.may_admit = True
        self._narrow: list[ScheduledRow] = []  # one-token rows
        self._narrow_requests: list[Request] = []
        self._wide: list[ScheduledRow] = []
        self._wide_requests: list[Request] = []
        self._new_requests: list[NewRequest] = []
        self.saves: dict[Request, int] = {}

    def add_row(
        self,
        request: Request,
        num_tokens: int,
        samples: bool,
        new_block_ids: tuple[BlockId, ...],
        num_prompt_logits: int = 0,
    ) -> None:
        """Schedules the next `num_tokens` tokens of a request; `num_prompt_logits` of them yield prompt logprobs."""
        if request.num_computed_tokens in request.state_points:
            self.saves[request] = request.num_computed_tokens
        row = ScheduledRow(
            request.request_id, num_tokens, request.num_computed_tokens, new_block_ids, samples, num_prompt_logits
        )
        if num_tokens == 1:
            self._narrow.append(row)
            self._narrow_requests.append(request)
        else:
            self._wide.append(row)
            self._wide_requests.append(request)
        self.budget -= num_tokens
        self.num_tokens += num_tokens
        request.num_computed_tokens += num_tokens
        request.num_rows_in_flight += 1
        if samples:
            request.num_pending_tokens += 1
            self._num_logits_left -= 1
        if num_prompt_logits:
            request.num_prompt_logits += num_prompt_logits
            self._num_logits_left -= num_prompt_logits

    def add_decode(self, request: Request, new_block_ids: tuple[BlockId, ...]) -> None:
        """Schedules the one token that a request lacks, and samples the next."""
        num_computed_tokens = request.num_computed_tokens
        self._narrow.append(
            tuple.__new__(  # ScheduledRow(...) takes twice the time, and there are hundreds in a step
                ScheduledRow, (request.request_id, 1, num_computed_tokens, new_block_ids, True, 0)
            )
        )
        self._narrow_requests.append(request)
        self.budget -= 1
        self.num_tokens += 1
        self._num_logits_left -= 1
        request.num_computed_tokens = num_computed_tokens + 1
        request.num_rows_in_flight += 1
        request.num_pending_tokens += 1

    @property
    def narrow_requests(self) -> Sequence[Request]:
        """The requests of one-token rows."""
        return self._narrow_requests

    def next_chunk(self, request: Request, max_tokens: int | None = None) -> tuple[int, bool, int]:
        """Returns as many known tokens of a request as the budgets allow.

        Args:
            request: a running request that lacks some.
            max_tokens: a limit besides the token budget; None: there is none.
        Returns: how many, 0 if the budget of logits is used up; whether they are the last ones, so that the request
            samples; and how many of them yield prompt logprobs.
        """
        num_missing = request.num_tokens - request.num_computed_tokens
        assert num_missing > 0, f"request {request.request_id} has nothing to compute"
        num_tokens = min(num_missing, self.budget)
        for point in request.state_points:
            if request.num_computed_tokens < point:
                num_tokens = min(num_tokens, point - request.num_computed_tokens)
                break
        if max_tokens is not None and max_tokens < num_tokens:
            num_tokens = max_tokens
        num_left, num_prompt_logits = self._num_logits_left, 0
        if (num_owed := request.num_owed_logits) > 0:
            # After preemption the prompt is recomputed; skip positions whose logprobs were already reported.
            num_before = max(0, request.num_prompt_logits - request.num_computed_tokens)
            if num_owed > num_left:
                num_tokens = min(num_tokens, num_before + num_left)
            num_prompt_logits = min(num_owed, max(0, num_tokens - num_before))
        if num_tokens == num_missing and num_prompt_logits == num_left:
            num_tokens -= 1
        return num_tokens, num_tokens == num_missing, num_prompt_logits

    def add_new_request(self, request: Request, block_ids: tuple[BlockId, ...], snapshot: int | None) -> None:
        """Adds a request that the runner does not know yet, with its block table and the copy of its state."""
        prompt_ids, output_ids = request.prompt_ids, request.output_ids
        self._new_requests.append(
            NewRequest(
                request.request_id,
                (*prompt_ids, *output_ids) if output_ids else prompt_ids,
                len(prompt_ids),
                request.params,
                block_ids,
                request.constraint,
                None if request.adapter is None else request.adapter.index,
                snapshot,
            )
        )

    def remove(self, request: Request) -> bool:
        """Removes a request from the plan: its row, if it has one, whose progress it reverts.

        Returns: whether the plan would have introduced it: then the runner does not know it.
        """
        self.saves.pop(request, None)
        for rows, requests in ((self._narrow, self._narrow_requests), (self._wide, self._wide_requests)):
            if request in requests:
                index = requests.index(request)
                del requests[index]
                row = rows.pop(index)
                self.budget += row.num_scheduled_tokens
                self.num_tokens -= row.num_scheduled_tokens
                request.num_computed_tokens -= row.num_scheduled_tokens
                request.num_rows_in_flight -= 1
                request.num_pending_tokens -= row.samples
                request.num_prompt_logits -= row.num_prompt_logits
                self._num_logits_left += row.samples + row.num_prompt_logits
        num_new = len(self._new_requests)
        self._new_requests = [new for new in self._new_requests if new.request_id != request.request_id]
        return len(self._new_requests) < num_new

    def build(
        self, step: int, removed_request_ids: list[RequestId], saved_states: tuple[SavedState, ...] = ()
    ) -> tuple[SchedulerOutput, list[Request]]:
        """Returns the plan, and the requests of its rows in the same order."""
        plan = SchedulerOutput(
            step,
            tuple(removed_request_ids),
            tuple(self._new_requests),
            (*self._narrow, *self._wide),
            self.num_tokens,
            saved_states,
        )
        return plan, self._narrow_requests + self._wide_requests
