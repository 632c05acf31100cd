"""The plan of a step while it is being made."""

from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, Request, RequestId


class BatchBuilder:
    """Rows and budget of one step, and the progress they mean for their requests.

    Invariants: budget left + tokens in rows == max_num_batched_tokens; a request has at most one row.
    """

    __slots__ = ("_narrow", "_narrow_requests", "_new_requests", "_wide", "_wide_requests", "budget", "num_tokens")

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = max_num_batched_tokens
        self.num_tokens = 0
        self._narrow: list[ScheduledRow] = []  # one-token rows
        self._narrow_requests: list[Request] = []
        self._wide: list[ScheduledRow] = []
        self._wide_requests: list[Request] = []
        self._new_requests: list[NewRequest] = []

    def add_row(self, request: Request, num_tokens: int, samples: bool, new_block_ids: tuple[BlockId, ...]) -> None:
        """Schedules the next `num_tokens` tokens of a request."""
        row = ScheduledRow(request.request_id, num_tokens, request.num_computed_tokens, new_block_ids, samples)
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

    def add_chunk(self, request: Request) -> None:
        """Schedules as many of the request's known tokens as the budget allows; their blocks are there."""
        num_missing = request.num_tokens - request.num_computed_tokens
        num_tokens = min(num_missing, self.budget)
        self.add_row(request, num_tokens, num_tokens == num_missing, ())

    def add_new_request(self, request: Request, block_ids: tuple[BlockId, ...]) -> None:
        """Introduces a request to the runner, with its block table."""
        token_ids = (*request.prompt_ids, *request.output_ids)
        self._new_requests.append(
            NewRequest(request.request_id, token_ids, request.num_prompt_tokens, request.params, block_ids)
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
