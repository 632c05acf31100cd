"""Headers and service tier become the targets of the public proto; malformed numbers are refused by name."""

import pytest

from frontend.api.http.errors import BodyError
from frontend.api.http.latency_headers import latency_targets


def test_without_any_there_are_no_targets():
    assert latency_targets({}, "") is None


def test_headers_are_milliseconds():
    targets = latency_targets({"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "33.5"}, "")
    assert targets.ttft.ToNanoseconds() == 500_000_000
    assert targets.inter_token.ToNanoseconds() == 33_500_000


@pytest.mark.parametrize(
    ("tier", "objective", "expected"),
    [
        ("batch", "", "batch"),
        ("", "batch", "batch"),
        ("auto", "batch", "batch"),
        ("default", "batch", "batch"),
        ("interactive", "batch", "interactive"),
        ("auto", "", "auto"),
    ],
)
def test_the_class_is_the_tier_or_the_gateways_objective(tier, objective, expected):
    headers = {"x-gateway-inference-objective": objective} if objective else {}
    assert latency_targets(headers, tier).service_class == expected


def test_the_ticket_comes_back():
    assert latency_targets({"x-chairlift-retry-ticket": "abc"}, "").retry_ticket == b"abc"


@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("text", ["", "abc", "0", "-1", "nan", "inf", "1e400", "86400001", "0x10"])
def test_bad_numbers_name_the_header(name, text):
    with pytest.raises(BodyError) as caught:
        latency_targets({name: text}, "")
    assert caught.value.status == 400
    assert caught.value.param == name
    assert caught.value.message == (
        f"{name} is {text!r}, it must be a number of milliseconds above 0, at most 86400000"
    )
