"""What must hold between the scheduler's queues, its plans in flight and the progress that requests claim."""

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
    for request in live:
        name, num_rows = f"request {request.request_id}", rows_in_flight.count(request)
        is_running = request in running
        if is_running != (request.status in (RequestStatus.RUNNING, RequestStatus.PARKED)):
            raise IntegrityError(f"{name} is {request.status.name}, running: {is_running}")
        if request.num_rows_in_flight != num_rows:
            raise IntegrityError(f"{name} counts {request.num_rows_in_flight} rows in flight of {num_rows}")
        if not 0 <= request.num_pending_tokens <= num_rows:
            raise IntegrityError(f"{name} waits for {request.num_pending_tokens} tokens of {num_rows} rows")
        num_computable = request.num_tokens + request.num_pending_tokens if is_running else 0
        if not 0 <= request.num_computed_tokens <= num_computable:
            raise IntegrityError(f"{name} has {request.num_computed_tokens} of {num_computable} tokens computed")
        if request.num_tokens >= request.max_num_tokens:
            raise IntegrityError(f"{name} has {request.num_tokens} tokens of {request.max_num_tokens} and goes on")
