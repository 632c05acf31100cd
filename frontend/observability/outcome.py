"""Outcome of a request, as metrics count it. Pure."""

import asyncio
from enum import Enum

from chairlift.service.end_reason import reasons_by_value
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import ClientStalled, DeadlineExceeded, InvalidRequest, ModelNotFound, QueueFull, TargetsInfeasible


class Outcome(Enum):
    """How an accepted request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    SHED = "shed"
    ERROR = "error"


COMPLETE_OUTCOMES = {
    value: Outcome(reason.finish_reason) for value, reason in reasons_by_value(pb.FinishReason.items()).items()
}


def failed_outcome(error: BaseException | None, *, deadline_passed: bool) -> Outcome:
    """Returns the outcome of a request that ended before its answer was complete.

    Args:
        error: the error that ended it; None: the reader of the answer stopped.
        deadline_passed: whether the call's deadline had passed; gRPC then cancels the call.
    """
    match error:
        case DeadlineExceeded():
            return Outcome.DEADLINE
        case None | asyncio.CancelledError() | GeneratorExit():
            return Outcome.DEADLINE if deadline_passed else Outcome.CANCELLED
        case ClientStalled():
            return Outcome.CANCELLED
        case QueueFull() | TargetsInfeasible():
            return Outcome.SHED
    return Outcome.ERROR


def is_refusal(error: BaseException | None) -> bool:
    """Whether a request was refused for its content; it then never counts as accepted."""
    return isinstance(error, (InvalidRequest, ModelNotFound))
