"""The vocabulary of ends against both protos, and the strings that users meet."""

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.service.end_reason import EndReason, reasons_by_value
from chairlift.v1 import generation_service_pb2 as pb


def test_engine_completes_with_every_reason_but_the_frontends_own():
    reasons = reasons_by_value(engine_pb.CompletionReason.items())
    assert set(reasons.values()) == set(EndReason) - {EndReason.STOP_TEXT}
    assert all(engine_pb.Completion(reason=f"COMPLETION_REASON_{r.name}").reason == v for v, r in reasons.items())


def test_public_reasons_are_those_of_complete_answers():
    reasons = reasons_by_value(pb.FinishReason.items())
    assert set(reasons.values()) == {reason for reason in EndReason if reason.is_complete}
    assert all(pb.Finished(reason=f"FINISH_REASON_{r.name}").reason == v for v, r in reasons.items())


def test_openai_and_metrics_know_two_words():
    assert {reason.name: reason.finish_reason for reason in EndReason if reason.is_complete} == {
        "END_TOKEN": "stop",
        "STOP_TOKEN": "stop",
        "STOP_TEXT": "stop",
        "MAX_TOKENS": "length",
        "CONTEXT_FULL": "length",
        "TIME_BUDGET": "length",
    }
