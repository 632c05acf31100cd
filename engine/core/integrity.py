"""What must hold between the scheduler's queues, its plans in flight and the progress that requests claim."""

from collections import Counter
from collections.abc import Collection, Sequence

from engine.core.request import Request, RequestStatus
from engine.errors import IntegrityError


def check_requests(
    live: Collection[Request],
    running: Collection[Request],
    waiting: Collection[Request],
    rows_in_flight: Sequence[Request],
) -> None:
    """Checks that every request is in exactly one place and counts its progress right.

    Args:
        live: requests that were accepted and have not ended.
        running: those with blocks.
        waiting: those without.
        rows_in_flight: the request of every row that has not been answered.
    Raises: IntegrityError: a contradiction, with the request and the numbers.
    """
    places = sorted(request.request_id for request in (*running, *waiting))
    if places != sorted(request.request_id for request in live):
        raise IntegrityError(f"{len(live)} live requests, of which {len(running)} run and {len(waiting)} wait")
    running_ids, num_rows_of = {request.request_id for request in running}, Counter(rows_in_flight)
    for request in live:
        name, num_rows = f"request {request.request_id}", num_rows_of[request]
        is_running = request.request_id in running_ids
        if is_running != (request.status in (RequestStatus.RUNNING, RequestStatus.PARKED)):
            raise IntegrityError(f"{name} is {request.status.name}, running: {is_running}")
        if request.num_rows_in_flight != num_rows:
            raise IntegrityError(f"{name} counts {request.num_rows_in_flight} rows in flight of {num_rows}")
        if not 0 <= request.num_pending_tokens <= num_rows:
            raise IntegrityError(f"{name} waits for {request.num_pending_tokens} tokens of {num_rows} rows")
        num_computable = request.num_tokens + request.num_pending_tokens if is_running else 0
        if not 0 <= request.num_computed_tokens <= num_computable:
            raise IntegrityError(f"{name} has {request.num_computed_tokens} of {num_computable} tokens computed")
        num_owed, num_asked = request.num_owed_logits, request.num_prompt_logits
        if num_asked < 0 or num_owed < 0 or (num_owed and request.num_computed_tokens > num_asked):
            raise IntegrityError(
                f"{name} has {request.num_computed_tokens} tokens computed, {num_asked} prompt logits, {num_owed} owed"
            )
        if request.num_tokens >= request.max_num_tokens:
            raise IntegrityError(f"{name} has {request.num_tokens} tokens of {request.max_num_tokens} and goes on")
