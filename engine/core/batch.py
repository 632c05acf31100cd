"""The plan of a step while it is being made."""

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, Request, RequestId


class BatchBuilder:
    """Rows and budget of one step, and the progress they mean for their requests.

    Logits have a budget of their own. It is what rows that sample need at most, one per seat; log-probabilities of
    prompts are worked off in what the others leave of it, so that they take no memory beside that of a full batch. A
    row that would sample beyond it ends before its last token, and samples in the next step as one of the first.

    Invariants: budget left + tokens in rows == max_num_batched_tokens; logits left + logits of rows == max_num_logits;
    a request has at most one row.
    """

    __slots__ = (
        "_narrow", "_narrow_requests", "_new_requests", "_num_logits_left", "_wide", "_wide_requests", "budget",
        "num_tokens",
    )  # fmt: skip

    def __init__(self, max_num_batched_tokens: int, max_num_logits: int) -> None:
        self.budget = max_num_batched_tokens
        self._num_logits_left = max_num_logits
        self.num_tokens = 0
        self._narrow: list[ScheduledRow] = []  # one-token rows
        self._narrow_requests: list[Request] = []
        self._wide: list[ScheduledRow] = []
        self._wide_requests: list[Request] = []
        self._new_requests: list[NewRequest] = []

    def add_row(
        self,
        request: Request,
        num_tokens: int,
        samples: bool,
        new_block_ids: tuple[BlockId, ...],
        num_prompt_logits: int = 0,
    ) -> None:
        """Schedules the next `num_tokens` tokens of a request; the logits of `num_prompt_logits` of them are wanted for
        the sake of its prompt.
        """
        row = tuple.__new__(  # ScheduledRow(...) takes twice the time, and there are hundreds in a step
            ScheduledRow,
            (request.request_id, num_tokens, request.num_computed_tokens, new_block_ids, samples, num_prompt_logits),
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

    def add_chunk(self, request: Request) -> None:
        """Schedules as many of the request's known tokens as the budgets allow, if any; their blocks are there."""
        num_missing = request.num_tokens - request.num_computed_tokens
        assert num_missing > 0, f"request {request.request_id} has nothing to compute"
        num_tokens = min(num_missing, self.budget)
        num_left, num_prompt_logits = self._num_logits_left, 0
        if (num_owed := request.num_owed_logits) > 0:
            # After a preemption it comes by what it has reported again.
            num_before = max(0, request.num_prompt_logits - request.num_computed_tokens)
            if num_owed > num_left:
                num_tokens = min(num_tokens, num_before + num_left)
            num_prompt_logits = min(num_owed, max(0, num_tokens - num_before))
        if num_tokens == num_missing and num_prompt_logits == num_left:
            num_tokens -= 1
        if num_tokens > 0:
            self.add_row(request, num_tokens, num_tokens == num_missing, (), num_prompt_logits)

    def add_new_request(self, request: Request, block_ids: tuple[BlockId, ...]) -> None:
        """Introduces a request to the runner, with its block table."""
        token_ids = (*request.prompt_ids, *request.output_ids)
        self._new_requests.append(
            NewRequest(
                request.request_id,
                token_ids,
                request.num_prompt_tokens,
                request.params,
                block_ids,
                request.constraint,
            )
        )

    def remove_row(self, request: Request) -> None:
        """Takes the row of a request out again, if it has one, with all it meant."""
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

    def build(self, step: int, removed_request_ids: list[RequestId]) -> tuple[SchedulerOutput, list[Request]]:
        """The plan, and the requests of its rows in the same order."""
        plan = SchedulerOutput(
            step,
            tuple(removed_request_ids),
            tuple(self._new_requests),
            (*self._narrow, *self._wide),
            self.num_tokens,
        )
        return plan, self._narrow_requests + self._wide_requests
