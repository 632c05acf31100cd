"""Shares of best effort, reserves of requests on time, and tenants."""

import random
from collections import Counter

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.latency.step_time import Coefficients, StepTimeModel, StepTimePrior
from engine.core.request import RequestStatus
from tests.support.engine.latency_world import H200, REFUSE, World, overload, quantile, random_arrivals


@pytest.mark.parametrize("share", [0.05, 0.1, 0.3])
def test_best_effort_gets_its_share_of_the_prompt_tokens_in_an_overload(share: float) -> None:
    world = World(best_effort_share=share)
    for number in range(1000, 1200):
        world.add(number, 1000)
    world.run(overload(world, rate=100.0), until_s=10.0)
    by_lane = Counter[bool]()
    for _, _, plan in world.steps:
        for row in plan.rows:
            by_lane[row.request_id >= 1000] += row.num_scheduled_tokens
    assert by_lane[True] / by_lane.total() == pytest.approx(share, abs=0.02)


def test_refusals_keep_first_tokens_in_time_in_an_overload() -> None:
    world = World()
    world.run(overload(world, rate=100.0))
    served = [number for number in world.ends if world.reason(number) is EndReason.MAX_TOKENS]
    assert len(served) > 380  # of about 46 * 10 that the device could compute
    assert quantile((world.ttft_s(number) for number in served), 0.99) <= 0.41


def test_best_effort_leaves_slots_for_requests_on_time_and_takes_them_when_there_are_none() -> None:
    world = World(max_num_seqs=20)
    world.add(1, 10, ttft_s=1.0)
    for number in range(100, 130):
        world.add(number, 10, max_tokens=10_000)
    world.run(until_s=0.3)
    assert world.scheduler.stats().num_running == 16
    world.add(2, 10, max_tokens=3, ttft_s=1.0)
    world.run(until_s=0.4)
    assert world.ttft_s(2) < 0.05
    world.now_s += 31.0
    world.run(until_s=world.now_s + 0.1)
    assert world.scheduler.stats().num_running == 20


def test_best_effort_keeps_its_share_of_the_slots_when_requests_on_time_take_the_rest() -> None:
    world = World(max_num_seqs=20, best_effort_share=0.1)
    for number in range(1, 21):
        world.add(number, 10, max_tokens=10_000, ttft_s=1.0)
    world.run(until_s=0.1)
    for number in range(1, 4):
        world.scheduler.cancel(number, world.now_s)
    for number in range(100, 110):
        world.add(number, 10, max_tokens=10_000)
    world.run(until_s=0.3)
    running = Counter(request.request_id >= 100 for request in world.scheduler._running.values())
    assert (running[True], running[False]) == (2, 17)


@pytest.mark.parametrize("waits_on_time", [False, True])
def test_best_effort_has_no_more_than_its_share_of_the_slots_beside_tight_gaps(waits_on_time: bool) -> None:
    prior = StepTimePrior(Coefficients(1e-3, 1e-5, 2e-3, 1e-9, 1e-12))  # 14 rows take 29 ms
    world = World(StepTimeModel(prior).predict_s, prior, max_num_seqs=40, best_effort_share=0.1)
    for number in range(14):
        world.add(number, 20, max_tokens=5000, ttft_s=5.0, inter_token_s=0.03)
    world.run(until_s=1.0)
    if waits_on_time:
        world.add(99, 20, ttft_s=300.0)
    world.run(until_s=1.2)
    for number in range(100, 120):
        world.add(number, 2, max_tokens=5000)
    world.run(until_s=1.5)
    started = [number for number, times_s in world.times_s.items() if times_s]
    assert started == [*range(14), *range(100, 104)]


def test_a_long_prompt_is_refused_if_its_attention_makes_it_late() -> None:
    """40,000 tokens take 0.8 s by their products, and 1.1 s more by their attention."""

    def refusal(ttft_s: float) -> EndReason:
        world = World(max_model_len=50_000)
        world.add(1, 40_000, ttft_s=ttft_s, when_infeasible=REFUSE)
        world.run(until_s=4.0)
        return world.reason(1)

    assert refusal(1.5) is EndReason.INFEASIBLE
    assert refusal(3.0) is EndReason.MAX_TOKENS


def test_best_effort_leaves_blocks_for_requests_on_time() -> None:
    world = World(num_blocks=1000, max_model_len=8192)
    world.add(1, 10, ttft_s=1.0)
    for number in range(100, 130):
        world.add(number, 1000, max_tokens=100)
    world.run(until_s=0.5)
    assert world.scheduler.stats().num_free_blocks >= 150
    world.add(2, 2000, ttft_s=0.5)
    world.run(until_s=1.0)
    assert world.ttft_s(2) < 0.2


def test_an_idle_prefix_that_an_admission_takes_is_not_left_free() -> None:
    world = World(num_blocks=100, max_model_len=1600)
    world.add(1, 960, ttft_s=10.0)
    world.run()
    world.add(2, 600, max_tokens=50, ttft_s=10.0, token=9)
    world.step()
    world.add(3, 970, max_tokens=50, ttft_s=10.0, token=2)  # 60 of 62 free blocks, 60 of them cached
    world.step()
    assert world.scheduler.stats().num_running == 1
    world.run()
    assert world.scheduler.stats().prefix_cache_hits_total >= 944
    assert world.ttft_s(3) < 1.0


def test_a_prefix_that_others_hold_takes_nothing_of_the_reserve() -> None:
    world = World(num_blocks=100, max_model_len=1600)
    world.add(1, 960, max_tokens=300, ttft_s=10.0, token=9)
    while not world.times_s[1]:
        world.step()
    world.add(2, 970, max_tokens=5, token=9)  # best effort: 20 blocks must stay free of 39
    world.run()
    assert world.times_s[2][0] < world.ended_s[1]
    assert world.ttft_s(2) < 0.1


def test_best_effort_that_waited_long_gets_blocks_and_slots_before_requests_on_time() -> None:
    world = World(max_num_seqs=8, num_blocks=300, max_model_len=4096)
    arrivals = random_arrivals(
        20.0,
        120.0,
        lambda n, at_s: world.add(n, 400, max_tokens=150, ttft_s=2.0, when_infeasible=REFUSE, arrival_s=at_s),
    )
    world.run([*arrivals, (5.0, lambda: world.add(9999, 3500))], until_s=120.0)
    assert 20.0 < world.ttft_s(9999) < 100.0


def test_a_long_best_effort_answer_that_loses_its_blocks_has_not_waited_long() -> None:
    world = World(lambda _: 0.1, num_blocks=100, max_model_len=1600, best_effort_share=0.5)
    answer = world.add(1, 100, max_tokens=1400)
    world.run(until_s=70.0)
    world.add(2, 300, max_tokens=1000, ttft_s=100.0)
    while answer.status is not RequestStatus.PREEMPTED:
        world.step()
    world.add(3, 600, ttft_s=100.0)
    world.run(until_s=world.now_s + 3.0)
    world.add(4, 50, ttft_s=100.0)
    world.run()
    assert world.ttft_s(4) < 1.0


def test_nor_has_one_that_moved_here_from_a_lost_engine() -> None:
    world = World(lambda _: 0.1, num_blocks=100, max_model_len=1600, best_effort_share=0.5)
    world.add(1, 600, max_tokens=500, ttft_s=100.0)
    world.step()
    world.add(2, 900, max_tokens=100, has_moved=True, waited_s=100.0, output_ids=[1] * 10)
    world.add(3, 600, ttft_s=100.0)
    world.run(until_s=world.now_s + 3.0)
    assert not world.times_s[2]  # lacks blocks
    world.add(4, 50, ttft_s=100.0)
    world.run()
    assert world.ttft_s(4) < 1.0


def test_a_best_effort_answer_that_lost_its_blocks_goes_ahead_of_those_that_have_not_begun() -> None:
    world = World(num_blocks=128, max_model_len=2048, enable_prefix_caching=False)
    for number in range(3):
        world.add(number, 500, max_tokens=300)
    while world.scheduler.stats().num_preemptions_total == 0:
        world.step()
    (preempted,) = (request for request in world.requests.values() if request.status is RequestStatus.PREEMPTED)
    num_tokens = len(preempted.output_ids)
    assert num_tokens > 0
    for number in range(3, 20):
        world.add(number, 100, max_tokens=100)
    world.run()
    assert world.times_s[preempted.request_id][num_tokens] <= min(world.times_s[number][0] for number in range(3, 20))


def test_best_effort_is_shared_among_tenants_by_the_service_they_had() -> None:
    world = World(max_num_seqs=4)
    for number in range(300):
        world.add(number, 500, max_tokens=10, tenant="flood")
    world.run(until_s=0.5)
    for number in range(1000, 1010):
        world.add(number, 500, max_tokens=10, tenant="light")
    world.run()
    light = sorted(world.times_s[number][0] for number in range(1000, 1010))
    assert light[0] < 0.7
    flood_meanwhile = sum(0.5 < world.times_s[number][0] < light[-1] for number in range(300))
    assert flood_meanwhile <= 25


def test_no_tenant_is_charged_for_cache_that_it_held_alone() -> None:
    world = World()
    world.add(1, 8000, max_tokens=10, token_credit=1, tenant="paused")
    world.run()
    assert world.scheduler.stats().num_running == 1
    world.now_s += 60.0
    world.add(2, 100, max_tokens=1000, tenant="other")
    shares = world.scheduler._shares
    world.step()
    assert shares.tokens("paused") < 100.0
    world.run(until_s=world.now_s + 1.0)
    assert shares.tokens("paused") == pytest.approx(8000 / (H200.coefficients.token_s * 4000 * 16), rel=0.2)


def test_beside_a_stream_that_gets_little_two_tenants_that_flood_share_the_engine() -> None:
    world = World(max_model_len=60_000, num_blocks=40_000, max_num_seqs=16)
    world.add(1, 100, max_tokens=50_000, tenant="stream")
    for number in range(1000, 2000):
        world.add(number, 1000, max_tokens=2, tenant="old")
    world.run(until_s=10.0)
    for number in range(2000, 3000):
        world.add(number, 1000, max_tokens=2, tenant="new")
    num_before = len(world.steps)
    world.run(until_s=15.0)
    tokens = Counter[str]()
    for _, _, plan in world.steps[num_before:]:
        for row in plan.rows:
            tokens[world.requests[row.request_id].tenant] += row.num_scheduled_tokens
    assert tokens["new"] / tokens["old"] == pytest.approx(1.0, rel=0.1)


def test_a_weight_is_a_share() -> None:
    world = World(max_num_seqs=4, tenant_weights={"big": 3.0})
    for number in range(400):
        world.add(number, 500, tenant=("big", "small")[number % 2])
    world.run(until_s=2.0)
    served = Counter(request.tenant for number, request in world.requests.items() if world.times_s[number])
    assert served["big"] / served["small"] == pytest.approx(3.0, rel=0.2)


def test_in_an_overload_the_tenant_that_floods_loses_its_requests_first() -> None:
    world, rng = World(), random.Random(3)
    arrivals = random_arrivals(
        100.0,
        20.0,
        lambda n, at_s: world.add(
            n, 1000, max_tokens=20, ttft_s=0.4, inter_token_s=0.1, when_infeasible=REFUSE, arrival_s=at_s,
            tenant="light" if rng.random() < 0.05 else "flood",
        ),
    )  # fmt: skip
    world.run(arrivals)
    light = [number for number, request in world.requests.items() if request.tenant == "light"]
    assert len(light) > 60
    in_time = sum(bool(world.times_s[number]) and world.ttft_s(number) <= 0.4 for number in light)
    assert in_time >= 0.97 * len(light)
