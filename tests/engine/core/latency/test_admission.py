"""Order and feasibility of prompts, and refusals, under the policy `slo`."""

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.latency import feasibility
from engine.core.latency.feasibility import LatePrompt, Slots, WaitingPrompt
from engine.core.latency.targets import WhenInfeasible
from engine.core.request import RequestStatus
from tests.support.engine.latency_world import DEGRADE, REFUSE, WAIT, World, quantile, random_arrivals


def test_the_earliest_due_time_goes_first_whatever_the_order_of_arrival() -> None:
    world = World(max_step_s=0.05)
    world.add(1, 6000, ttft_s=5.0)
    world.add(2, 2000, ttft_s=0.3)
    world.add(3, 1000)
    world.run()
    assert world.times_s[2] < world.times_s[1] < world.times_s[3]


def test_a_prompt_that_runs_gives_way_to_one_that_is_due_earlier() -> None:
    world = World(max_step_s=0.02)
    world.add(1, 8000, ttft_s=5.0)
    world.step()
    world.add(2, 500, ttft_s=0.2)
    world.run()
    assert world.times_s[2] < world.times_s[1]


def test_what_cannot_be_in_time_is_refused_with_the_times_in_the_message() -> None:
    world = World()
    world.add(1, 8000, ttft_s=0.05, when_infeasible=REFUSE)  # takes 0.2 s
    world.run()
    assert world.reason(1) is EndReason.INFEASIBLE
    assert "the first token is due in 0.050 s, expected in 0.2" in world.ends[1].detail
    assert not world.times_s[1]
    assert world.scheduler.stats().num_infeasible_total == 1


@pytest.mark.parametrize(("when", "num_degraded"), [(DEGRADE, 1), (WAIT, 0)])
def test_what_cannot_be_in_time_may_be_served_as_best_effort(when: WhenInfeasible, num_degraded: int) -> None:
    world = World()
    world.add(1, 8000, ttft_s=0.05, when_infeasible=when)
    world.add(2, 2000, ttft_s=1.0)
    world.run()
    assert world.times_s[2] < world.times_s[1]
    assert world.scheduler.stats().num_degraded_total == num_degraded
    assert world.scheduler.stats().num_infeasible_total == 0


def test_of_two_that_exclude_each_other_the_longer_one_is_refused_and_value_counts() -> None:
    for value, refused in ((1.0, 1), (10.0, 2)):
        world = World()
        world.add(1, 8000, ttft_s=0.25, when_infeasible=REFUSE, value=value)  # 0.21 s
        world.add(2, 4000, ttft_s=0.26, when_infeasible=REFUSE)  # 0.09 s
        world.run()
        assert {request_id for request_id in world.ends if world.reason(request_id) is EndReason.INFEASIBLE} == {
            refused
        }


def test_a_cached_prefix_is_no_work() -> None:
    world = World()
    world.add(1, 8000, token=7)
    world.run()
    world.add(2, 8064, token=7, ttft_s=0.05, when_infeasible=REFUSE)
    world.add(3, 8064, token=9, ttft_s=0.05, when_infeasible=REFUSE)
    world.run()
    assert world.reason(2) is EndReason.MAX_TOKENS
    assert world.reason(3) is EndReason.INFEASIBLE


def test_a_request_that_moved_here_is_never_refused() -> None:
    world = World()
    world.add(1, 8000, ttft_s=0.0, when_infeasible=REFUSE, has_moved=True, waited_s=3.0)
    world.add(2, 8000, ttft_s=0.0, when_infeasible=REFUSE)
    world.run()
    assert (world.reason(1), world.reason(2)) == (EndReason.MAX_TOKENS, EndReason.INFEASIBLE)


def test_answers_that_moved_here_and_are_late_anyway_cost_no_prompt_its_place() -> None:
    world = World()
    for number in range(20):
        world.add(number, 50, ttft_s=0.2, when_infeasible=REFUSE)
    for number in range(100, 105):
        world.add(number, 8000, max_tokens=10, ttft_s=0.3, inter_token_s=0.2, has_moved=True, output_ids=[1, 2, 3])
    world.run()
    assert {world.reason(number) for number in world.requests} == {EndReason.MAX_TOKENS}


def test_of_a_long_queue_a_step_checks_the_first_prompts_and_all_of_them_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = []

    def find_late(prompts: list[WaitingPrompt], now_s: float, start_s: float, slots: Slots) -> list[LatePrompt]:
        checked.append(len(prompts))
        return feasibility.find_late(prompts, now_s, start_s, slots)

    monkeypatch.setattr("engine.core.latency.scheduler.find_late", find_late)
    world = World(max_num_seqs=8)
    for number in range(1000):
        world.add(number, 20, max_tokens=1000, ttft_s=100.0, when_infeasible=REFUSE)
    while world.now_s < 0.24:
        world.add(2000 + len(world.steps), 20, max_tokens=1000, ttft_s=200.0, when_infeasible=REFUSE)
        world.step()
    assert len(checked) > 40
    assert 4 <= sum(num > 900 for num in checked) <= 5
    assert {num for num in checked if num <= 900} == {64}
    world.add(5000, 8000, ttft_s=0.05, when_infeasible=REFUSE)  # takes 0.2 s
    world.step()
    assert world.reason(5000) is EndReason.INFEASIBLE


def test_an_answer_that_was_preempted_is_not_given_up_though_its_first_token_was_due_long_ago() -> None:
    world = World(num_blocks=128, max_model_len=2048, enable_prefix_caching=False)
    for number in range(3):
        world.add(number, 500, max_tokens=300, ttft_s=0.5, inter_token_s=1.0, when_infeasible=REFUSE)
    world.run(until_s=0.2)
    for number in range(3, 6):
        world.add(number, 100, max_tokens=20, ttft_s=60.0, inter_token_s=1.0, when_infeasible=REFUSE)
    world.now_s = 5.0
    world.run()
    assert world.scheduler.stats().num_preemptions_total > 0
    assert {world.reason(number) for number in range(6)} == {EndReason.MAX_TOKENS}


def test_a_preempted_answer_resumes_before_prompts_that_are_due_earlier_than_its_first_token_was() -> None:
    world = World(num_blocks=128, max_model_len=2048, enable_prefix_caching=False)
    for number in range(3):
        world.add(number, 500, max_tokens=300, ttft_s=100.0, inter_token_s=1.0)
    while world.scheduler.stats().num_preemptions_total == 0:
        world.step()
    (preempted,) = (request for request in world.requests.values() if request.status is RequestStatus.PREEMPTED)
    num_tokens = len(preempted.output_ids)
    world.add(3, 100, ttft_s=50.0)
    world.run()
    assert world.times_s[preempted.request_id][num_tokens] <= world.times_s[3][0]


def test_a_request_that_lost_its_blocks_with_its_first_token_in_flight_is_not_refused() -> None:
    world = World(num_blocks=68, max_model_len=1024, max_steps_in_flight=2)
    for number in range(12):
        world.add(number, 64, max_tokens=60, ttft_s=5.0, inter_token_s=1.0)
    while world.requests[0].num_computed_tokens < 79:
        world.step()
    request = world.add(99, 5, max_tokens=50, ttft_s=0.03, inter_token_s=1.0, when_infeasible=REFUSE)
    while request.status is not RequestStatus.PREEMPTED:  # the others need a block each, and it loses the least
        world.step()
    assert len(request.output_ids) == 1
    assert request.pace is not None
    assert request.pace.next_due_s == pytest.approx(world.now_s + 1.0)
    world.run()
    assert (world.reason(99), len(world.times_s[99])) == (EndReason.MAX_TOKENS, 50)


def test_plans_do_not_depend_on_the_largest_number_of_output_tokens() -> None:
    plans = []
    for max_tokens in (5, 5000):
        world = World()
        world.add(1, 600, max_tokens=max_tokens, ttft_s=0.5, inter_token_s=0.03)
        world.add(2, 900, max_tokens=max_tokens)
        plans.append([world.step() for _ in range(4)])
    assert plans[0] == plans[1]


def test_short_prompts_that_wait_for_slots_do_not_make_the_engine_look_slow() -> None:
    world = World(max_num_seqs=8)
    for number in range(300):
        world.add(number, 20, max_tokens=25 + number % 8, ttft_s=100.0)
    world.run(until_s=1.0)
    assert world.scheduler.stats().num_waiting > 0
    world.add(999, 4000, ttft_s=0.5, when_infeasible=REFUSE)  # 0.1 s of work
    world.run()
    assert world.reason(999) is EndReason.MAX_TOKENS
    assert world.ttft_s(999) < 0.3


def test_slots_that_are_not_released_in_time_lead_to_refusals() -> None:
    world = World(max_num_seqs=4)
    arrivals = random_arrivals(
        60.0, 5.0, lambda n, at_s: world.add(n, 50, max_tokens=100, ttft_s=0.5, when_infeasible=REFUSE, arrival_s=at_s)
    )
    world.run(arrivals)
    served = [number for number in world.ends if world.reason(number) is EndReason.MAX_TOKENS]
    assert 20 < len(served) < len(arrivals)
    assert quantile((world.ttft_s(number) for number in served), 0.9) <= 0.5  # those promised a slot got one
    refused = [number for number in world.ends if world.reason(number) is EndReason.INFEASIBLE]
    waits_s = [world.ended_s[number] - world.requests[number].arrival_s for number in refused if number > 50]
    assert quantile(waits_s, 0.5) < 0.1  # others learn it at once, not when their time is up
