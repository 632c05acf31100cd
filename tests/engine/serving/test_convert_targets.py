"""Latency targets of a submission reach the request, and values out of range are named."""

import math
from typing import Any

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.latency.targets import LatencyTargets, Pacing, WhenInfeasible
from engine.core.request import RequestId
from engine.errors import InvalidRequest
from engine.serving.convert import RequestLimits, request_from_submission
from engine.serving.convert_targets import targets_from_submission
from tests.support.engine.client import submission


def request_of(**fields: Any) -> Any:
    message = submission(1, [1, 2])
    message.MergeFrom(pb.Submission(**fields))
    return request_from_submission(message, RequestId(7), RequestLimits(vocab_size=1000, max_logprobs=5), now_s=100.0)


def test_a_submission_without_targets_has_none() -> None:
    request = request_of(value=2.0, pacing=pb.PACING_PACED)
    assert request.targets is None
    assert request.tenant == ""


def test_every_field_arrives() -> None:
    request = request_of(
        ttft_remaining_ms=250,
        inter_token_us=30_500,
        tenant="acme",
        service_class="interactive",
        value=2.5,
        pacing=pb.PACING_PACED,
        when_infeasible=pb.WHEN_INFEASIBLE_REFUSE,
    )
    assert request.tenant == "acme"
    assert request.targets == LatencyTargets(
        ttft_s=0.25,
        inter_token_s=0.0305,
        pacing=Pacing.PACED,
        when_infeasible=WhenInfeasible.REFUSE,
        value=2.5,
        service_class="interactive",
    )


def test_a_class_alone_is_best_effort_with_a_name() -> None:
    assert targets_from_submission(pb.Submission(service_class="batch")) == LatencyTargets(service_class="batch")


def test_a_late_first_token_is_due_at_once() -> None:
    targets = targets_from_submission(pb.Submission(ttft_remaining_ms=0))
    assert targets == LatencyTargets(ttft_s=0.0)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        (pb.WHEN_INFEASIBLE_REFUSE, WhenInfeasible.WAIT),
        (pb.WHEN_INFEASIBLE_DEGRADE, WhenInfeasible.DEGRADE),
        (pb.WHEN_INFEASIBLE_WAIT, WhenInfeasible.WAIT),
    ],
)
def test_a_moved_request_is_never_refused(asked: pb.WhenInfeasible, kept: WhenInfeasible) -> None:
    targets = targets_from_submission(pb.Submission(ttft_remaining_ms=9, epoch=1, when_infeasible=asked))
    assert targets is not None
    assert targets.when_infeasible is kept


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inter_token_us": 0}, "inter_token_us is 0, it must be above 0"),
        ({"service_class": "x", "value": 0.0}, "value is 0, it must be a finite number above 0"),
        ({"service_class": "x", "value": -1.0}, "value is -1, it must be a finite number above 0"),
        ({"service_class": "x", "value": math.nan}, "value is nan, it must be a finite number above 0"),
        ({"service_class": "x", "value": math.inf}, "value is inf, it must be a finite number above 0"),
        ({"service_class": "é" * 33}, "service_class has 66 bytes, at most 64 are allowed"),
        ({"service_class": "x", "pacing": 9}, r"pacing is 9, this engine knows \[0, 1, 2\]"),
        ({"service_class": "x", "when_infeasible": 9}, r"when_infeasible is 9, this engine knows \[0, 1, 2, 3\]"),
        ({"tenant": "é" * 33}, "tenant has 66 bytes, at most 64 are allowed"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        request_of(**fields)
