"""Targets of a request, its class and its key become one value; contradictions name the field and the numbers."""

import math

import pytest
from google.protobuf.duration_pb2 import Duration

from chairlift.service.service_classes import parse_service_classes
from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.caller import Caller
from frontend.errors import InvalidRequest
from frontend.request.latency_targets import latency_targets
from frontend.types import LatencyTargets

CLASSES = parse_service_classes(
    """
    [classes.interactive]
    ttft_ms = 500
    inter_token_ms = 30
    weight = 2
    pacing = "paced"
    when_infeasible = "refuse"
    headroom = 0.25
    [classes.standard]
    ttft_ms = 2000
    tokens_per_second = 20
    [classes.batch]
    """,
    "classes.toml",
)
INTERACTIVE = LatencyTargets(
    ttft_s=0.5,
    inter_token_s=0.03,
    service_class="interactive",
    value=2.0,
    pacing="paced",
    when_infeasible="refuse",
    headroom=0.25,
)
ANYBODY = Caller()


def seconds(value):
    duration = Duration()
    duration.FromNanoseconds(round(value * 1e9))
    return duration


def targets_of(classes=CLASSES, caller=ANYBODY, **fields):
    spec = pb.GenerationSpec(text="x")
    if fields:
        spec.latency_targets.CopyFrom(pb.LatencyTargets(**fields))
    return latency_targets(spec, classes, caller)


def test_without_classes_and_targets_there_are_none():
    assert targets_of({}) is None
    assert targets_of({}, Caller("acme")) is None
    assert targets_of({}, service_class="whatever") is None


def test_targets_need_no_classes():
    assert targets_of({}, Caller("acme"), ttft=seconds(0.25), inter_token=seconds(0.04)) == LatencyTargets(
        ttft_s=0.25, inter_token_s=0.04, tenant="acme", is_own=True
    )


def test_a_class_has_all_of_its_values():
    assert targets_of(service_class="interactive") == INTERACTIVE


def test_a_class_without_targets_is_best_effort():
    assert targets_of(service_class="batch") == LatencyTargets(service_class="batch")


def test_with_classes_every_request_has_a_tenant():
    assert targets_of(caller=Caller("acme")) == LatencyTargets(tenant="acme")


@pytest.mark.parametrize("name", ["", "auto", "default"])
def test_the_key_decides_if_the_request_leaves_it_to_the_server(name):
    caller = Caller("acme", ("standard", "batch"))
    targets = targets_of(caller=caller, service_class=name)
    assert (targets.service_class, targets.tenant) == ("standard", "acme")


def test_classes_may_be_named_auto_and_default():
    classes = parse_service_classes("[classes.default]\nttft_ms = 100", "f")
    assert targets_of(classes, service_class="default").ttft_s == 0.1


def test_own_targets_replace_those_of_the_class():
    targets = targets_of(service_class="interactive", ttft=seconds(0.1))
    assert (targets.ttft_s, targets.inter_token_s, targets.is_own) == (0.1, 0.03, True)


def test_a_rate_is_a_time_between_tokens():
    assert targets_of({}, min_tokens_per_second=25).inter_token_s == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (
            {"inter_token": seconds(0.05), "min_tokens_per_second": 25},
            "min_tokens_per_second",
            "min_tokens_per_second is 25 and inter_token is 0.05 s: set one of them",
        ),
        ({"ttft": Duration()}, "ttft", "ttft is 0 s, it must be above 0 and at most 86400 s"),
        ({"ttft": seconds(-1)}, "ttft", "ttft is -1 s"),
        ({"ttft": seconds(86401)}, "ttft", "ttft is 86401 s"),
        ({"ttft": Duration(seconds=1, nanos=-1)}, "ttft", "ttft has 1 seconds and -1 nanos"),
        ({"inter_token": Duration()}, "inter_token", "inter_token is 0 s"),
        ({"min_tokens_per_second": 0}, "min_tokens_per_second", "min_tokens_per_second is 0, it must be at least"),
        ({"min_tokens_per_second": -3}, "min_tokens_per_second", "min_tokens_per_second is -3"),
        ({"min_tokens_per_second": math.nan}, "min_tokens_per_second", "min_tokens_per_second is nan"),
        ({"min_tokens_per_second": math.inf}, "min_tokens_per_second", "min_tokens_per_second is inf"),
        ({"min_tokens_per_second": 1e-30}, "min_tokens_per_second", "min_tokens_per_second is 1e-30"),
        (
            {"service_class": "gold"},
            "service_class",
            "service_class 'gold' is unknown, this server has interactive, standard, batch",
        ),
        ({"service_class": "g" * 1000}, "service_class", f"service_class '{'g' * 128}' is unknown"),
        ({"retry_ticket": b"x" * 257}, "retry_ticket", "retry_ticket has 257 bytes, at most 256"),
        ({"retry_ticket": b"\xff"}, "retry_ticket", "retry_ticket is no ticket of this server"),
        ({"retry_ticket": b"x"}, "retry_ticket", "retry_ticket needs a service class with a first-token target"),
        ({"retry_ticket": b"x", "service_class": "standard"}, "retry_ticket", "retry_ticket needs a service class"),
    ],
)
def test_bad_input_names_the_field(fields, field, message):
    with pytest.raises(InvalidRequest) as caught:
        targets_of(**fields)
    assert caught.value.message.startswith(message)
    assert caught.value.field == f"spec.latency_targets.{field}"


def test_a_bound_key_has_only_its_classes():
    with pytest.raises(InvalidRequest, match="service_class 'interactive' is not among those of the API key: batch"):
        targets_of(caller=Caller("acme", ("batch",)), service_class="interactive")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttft": seconds(1.9)}, "ttft is 1.9 s, tighter than service class 'standard' of the API key, which has 2 s"),
        ({"min_tokens_per_second": 21}, "inter_token is 0.047619 s, tighter than service class 'standard'"),
        (
            {"service_class": "batch", "ttft": seconds(60)},
            "ttft is 60 s, tighter than service class 'batch' of the API key, which has none",
        ),
    ],
)
def test_a_bound_key_cannot_ask_for_more_than_its_class(fields, message):
    caller = Caller("acme", ("standard", "batch"))
    with pytest.raises(InvalidRequest) as caught:
        targets_of(caller=caller, **fields)
    assert caught.value.message.startswith(message)
    targets_of(caller=caller, ttft=seconds(2), min_tokens_per_second=20)
