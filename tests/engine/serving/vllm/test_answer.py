"""One answer of a Generate call: what becomes of rejections and aborts."""

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.serving.vllm.answer import Answer

FULL = pb.Rejection(reason=pb.REJECTION_REASON_QUEUE_FULL, detail="full")


def test_an_answer_is_submitted_again_after_a_rejection() -> None:
    answer = Answer(1, None, 0)
    answer.handle = 5
    answer.reject(FULL)
    assert not answer.is_open
    answer.reset()
    assert (answer.is_open, answer.handle) == (True, 0)


def test_an_answer_that_was_aborted_between_its_rejection_and_the_next_try_ends() -> None:
    answer = Answer(1, None, 0)
    answer.handle = 5
    answer.reject(FULL)
    answer.abort()
    answer.reset()
    assert answer.end is not None
    assert answer.end.finish_reason == "abort"
