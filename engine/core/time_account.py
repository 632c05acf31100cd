"""Where the time of a request in the engine goes: every moment counts as one of five kinds, so that they add up to the
time from its arrival to its end.
"""

from enum import IntEnum

from engine.core.outputs import TimeAccount
from engine.core.request import Request, RequestStatus


class _Kind(IntEnum):
    """In the order of the fields of `TimeAccount` and of `Request.spent_s`."""

    QUEUED = 0
    PREFILL = 1
    DECODE = 2
    PARKED = 3
    PREEMPTED = 4


def charge_time(request: Request, now_s: float) -> None:
    """Charges the time since the last charge to what the request is doing. Call it before that changes."""
    elapsed_s = now_s - request.charged_until_s
    if elapsed_s > 0:
        request.spent_s[_kind(request)] += elapsed_s
        request.charged_until_s = now_s


def time_account(request: Request) -> TimeAccount:
    """What has been charged so far."""
    queued_s, prefill_s, decode_s, parked_s, preempted_s = request.spent_s
    return TimeAccount(queued_s, prefill_s, decode_s, parked_s, preempted_s, request.num_preemptions)


def _kind(request: Request) -> _Kind:
    """Without credit it is parked, wherever it stands: it could not run if it had a seat."""
    if request.token_credit is not None and request.token_credit <= 0:
        return _Kind.PARKED
    if request.status is RequestStatus.WAITING:
        return _Kind.QUEUED
    if request.status is RequestStatus.PREEMPTED:
        return _Kind.PREEMPTED
    return _Kind.PREFILL if request.first_token_s is None else _Kind.DECODE
