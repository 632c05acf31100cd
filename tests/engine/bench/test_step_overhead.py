"""Requests and parts of the measured steps."""

from collections import Counter

import pytest

from engine.bench.step_overhead import Arrivals, Variant, median_step
from engine.core.config import SchedulingPolicyName


def test_under_churn_a_fifth_ends_in_every_step() -> None:
    arrivals = Arrivals(Variant(10, True, "fcfs"), prompt_len=4)
    first = arrivals.take(10, 0.0)
    assert Counter(request.params.max_tokens for request in first) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 2}
    assert {request.params.max_tokens for request in arrivals.take(20, 1.0)} == {5}


def test_without_churn_no_request_ends() -> None:
    requests = Arrivals(Variant(10, False, "fcfs"), prompt_len=4).take(10, 0.0)
    assert {request.params.max_tokens for request in requests} == {1024}


def test_prompts_are_unique() -> None:
    requests = Arrivals(Variant(10, True, "fcfs"), prompt_len=32).take(50, 0.0)
    assert len({request.prompt_ids for request in requests}) == 50


def test_only_slo_has_targets() -> None:
    (with_targets,) = Arrivals(Variant(1, True, "slo"), prompt_len=4).take(1, 0.0)
    (without,) = Arrivals(Variant(1, True, "fcfs"), prompt_len=4).take(1, 0.0)
    assert with_targets.targets is not None
    assert without.targets is None


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_the_parts_are_within_the_whole(policy: SchedulingPolicyName) -> None:
    times = median_step(Variant(5, True, policy), 7)
    assert 0 < max(times.add_ms, times.schedule_ms, times.pack_ms, times.update_ms) < times.step_ms
    assert max(times.schedule_ms, times.update_ms) < times.schedule_update_ms < times.step_ms
