from collections.abc import Callable
from typing import get_args

import pytest

from engine.core.config import SchedulerConfig, SchedulingPolicyName
from engine.core.latency.scheduler import LatencyScheduler
from engine.core.latency.step_time import Coefficients, StepTimePrior
from engine.core.policy import FcfsPolicy, PriorityPolicy, StaticPolicy, make_policy
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.schedulers import make_scheduler

MakeRequest = Callable[..., Request]


def test_every_policy_name_makes_its_policy() -> None:
    kinds = {"fcfs": FcfsPolicy, "priority": PriorityPolicy, "static": StaticPolicy}
    for name in set(get_args(SchedulingPolicyName)) - {"slo"}:
        config = SchedulerConfig(num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=16, policy=name)
        assert type(make_policy(config)) is kinds[name]
        assert type(make_scheduler(config)) is Scheduler


def test_slo_is_a_scheduler_of_its_own() -> None:
    step_time = StepTimePrior(Coefficients(1e-3, 1e-4, 1e-5, 1e-7, 1e-8))
    config = SchedulerConfig(
        num_blocks=1, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=16, policy="slo", step_time=step_time
    )
    assert type(make_scheduler(config)) is LatencyScheduler


def test_fcfs_orders_by_acceptance_and_knows_one_class(make_request: MakeRequest) -> None:
    policy = FcfsPolicy(4)
    early = make_request(2, 1, priority=3, arrival_s=9.0)
    late = make_request(1, 1, priority=-3)
    policy.arrive(early)
    policy.arrive(late)
    assert policy.order_key(early) < policy.order_key(late)
    assert policy.preemption_class(early) == policy.preemption_class(late)


def test_requests_that_have_moved_go_first_and_among_themselves_in_order(make_request: MakeRequest) -> None:
    policy = FcfsPolicy(4)
    requests = [make_request(number, 1000, has_moved=number >= 3, session=number % 2) for number in range(6)]
    for request in requests:
        policy.arrive(request)
    order = sorted(requests, key=lambda request: (policy.order_key(request), request.request_id))
    assert [request.request_id for request in order] == [3, 4, 5, 0, 1, 2]
    assert policy.order_key(requests[5]) > policy.order_key(requests[3])  # exact, however far ahead they are


@pytest.mark.parametrize(("waited_s", "comes_first"), [(19.0, False), (21.0, True)])
def test_ageing_is_worth_one_priority_level_per_ten_seconds(
    make_request: MakeRequest, waited_s: float, comes_first: bool
) -> None:
    policy = PriorityPolicy(4)
    old = make_request(1, 1, priority=2, arrival_s=0.0)
    new = make_request(2, 1, priority=0, arrival_s=waited_s)
    assert (policy.order_key(old) < policy.order_key(new)) == comes_first
    moved = make_request(3, 1, priority=2, arrival_s=waited_s, waited_s=waited_s)
    assert policy.order_key(moved) == policy.order_key(old)


def test_ageing_does_not_change_the_preemption_class(make_request: MakeRequest) -> None:
    policy = PriorityPolicy(4)
    assert policy.preemption_class(make_request(1, 1, priority=2, arrival_s=0.0)) == 2


def test_static_leaves_the_slots_of_finished_requests_empty() -> None:
    policy = StaticPolicy(4)
    assert policy.max_admissions(0) == 4
    policy.end_admission(4, out_of_budget=False)
    assert [policy.max_admissions(num_running) for num_running in (4, 3, 1)] == [0, 0, 0]
    assert policy.max_admissions(0) == 4


def test_static_keeps_a_batch_open_while_only_the_budget_is_missing() -> None:
    policy = StaticPolicy(4)
    assert policy.max_admissions(0) == 4
    policy.end_admission(1, out_of_budget=True)
    assert policy.max_admissions(1) == 3
    policy.end_admission(1, out_of_budget=False)
    assert policy.max_admissions(2) == 0
