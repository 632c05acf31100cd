"""The one word under which a request's end is counted. Pure: errors in, words out."""

import asyncio
from enum import Enum

from chairlift.service.end_reason import reasons_by_value
from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import ClientStalled, DeadlineExceeded, InvalidRequest, ModelNotFound, QueueFull


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
    """The outcome of a request that ended before its answer was complete.

    Args:
        error: what ended it; None: whoever read the answer just stopped.
        deadline_passed: whether the call's deadline had passed: gRPC cancels the call, whichever side noticed.
    """
    match error:
        case DeadlineExceeded():
            return Outcome.DEADLINE
        case None | asyncio.CancelledError() | GeneratorExit():
            return Outcome.DEADLINE if deadline_passed else Outcome.CANCELLED
        case ClientStalled():
            return Outcome.CANCELLED
        case QueueFull():
            return Outcome.SHED
    return Outcome.ERROR


def is_refusal(error: BaseException | None) -> bool:
    """Whether a request was turned away for what it asks, whoever found out: it was never an accepted one."""
    return isinstance(error, (InvalidRequest, ModelNotFound))
