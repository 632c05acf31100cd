"""Checks of the accounting that ends each answer."""

from chairlift.v1 import generation_service_pb2 as pb

_PARTS = ("queued", "tokenized", "prefill", "decode", "parked", "preempted", "moved")


def check_account(finished: pb.Finished) -> None:
    """Checks that the parts of an answer's time sum up to its total time."""
    timing = finished.timing
    assert sum(getattr(timing, part).ToMicroseconds() for part in _PARTS) == timing.total.ToMicroseconds()
