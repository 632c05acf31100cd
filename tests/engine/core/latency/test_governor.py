"""The governor: steps end before the gaps of streams exceed their targets."""

import random

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.latency.step_time import Coefficients, StepShape, StepTimeModel, StepTimePrior
from engine.core.latency.targets import Pacing
from engine.core.request import RequestId
from tests.support.engine.latency_world import H200, REFUSE, World, predict_s, quantile, random_arrivals


def streams_beside_prompts(
    policy: str, pacing: Pacing = Pacing.GAP, num_in_flight: int = 1, factor: float = 1.0, noise: float = 0.03
) -> tuple[World, float]:
    """16 streams with a target of twice their gap alone, beside ten 2,048-token prompts a second, for 20 s."""
    rng, model = random.Random(1), StepTimeModel(H200)
    prior = StepTimePrior(Coefficients(*(factor * value for value in H200.coefficients)), H200.knee_tokens)
    target_s = 2 * model.predict_s(StepShape(16, 16, 16 * 500, 0))
    world = World(
        lambda shape: model.predict_s(shape) * rng.gauss(1.0, noise),
        prior,
        policy=policy,
        max_num_batched_tokens=2048,
        max_steps_in_flight=num_in_flight,
    )
    targets = {"ttft_s": 5.0, "inter_token_s": target_s, "pacing": pacing}
    for number in range(16):
        world.add(number, 100, max_tokens=10_000, **targets)
    world.run(
        random_arrivals(10.0, 20.0, lambda n, at_s: world.add(100 + n, 2048, ttft_s=5.0, arrival_s=at_s)), until_s=20.0
    )
    return world, target_s


@pytest.mark.parametrize("num_in_flight", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_gaps_of_streams_keep_their_target_beside_prompts(num_in_flight: int, factor: float) -> None:
    world, target_s = streams_beside_prompts("slo", num_in_flight=num_in_flight, factor=factor)
    gaps_s = [gap_s for number in range(16) for gap_s in world.gaps_s(number)]
    assert quantile(gaps_s, 0.99) <= 1.1 * target_s
    prompts = [number for number, times_s in world.times_s.items() if number >= 100 and times_s]
    assert len(prompts) > 150
    assert quantile((world.ttft_s(number) for number in prompts), 0.5) < 0.2


def test_a_fixed_budget_misses_this_target_by_far() -> None:
    world, target_s = streams_beside_prompts("fcfs")
    assert quantile((gap_s for number in range(16) for gap_s in world.gaps_s(number)), 0.99) > 3 * target_s


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_paced_streams_are_never_behind_their_schedule(num_in_flight: int) -> None:
    world, target_s = streams_beside_prompts("slo", Pacing.PACED, num_in_flight)
    for number in range(16):
        times_s = world.times_s[number]
        late = sum(at_s > times_s[0] + k * target_s for k, at_s in enumerate(times_s))
        assert late <= 0.01 * len(times_s)


def test_steps_are_short_while_nothing_with_targets_runs() -> None:
    world = World(max_step_s=0.1)
    for number in range(10):
        world.add(number, 8000)
    world.run()
    assert max(duration_s for duration_s, _, _ in world.steps) <= 0.101
    assert quantile((duration_s for duration_s, _, _ in world.steps), 0.5) > 0.09


def test_the_budget_is_in_seconds_chunks_shrink_as_a_prompt_gets_longer() -> None:
    world = World(max_step_s=0.02)
    world.add(1, 16_000)
    world.run()
    chunks = [shape.num_tokens for _, shape, _ in world.steps if shape.num_pairs]
    assert chunks[0] > 1.5 * chunks[-2]
    assert all(duration_s == pytest.approx(0.02, rel=0.05) for duration_s, _, _ in world.steps[:-1])


def test_prompts_make_progress_even_if_decodes_alone_exceed_every_target() -> None:
    world = World()
    for number in range(8):
        world.add(number, 100, max_tokens=400, ttft_s=1.0, inter_token_s=0.05)
    world.run(until_s=0.1)
    world.cost = lambda _: 0.2  # the device becomes far slower
    world.add(9, 1000, arrival_s=world.now_s)
    chunks = [world.step()[9] for _ in range(3)]
    assert chunks[0] >= 64
    world.run()
    assert world.reason(9) is EndReason.MAX_TOKENS


def test_streams_keep_their_target_again_after_the_device_was_slow() -> None:
    world = World(max_num_batched_tokens=2048)
    world.cost = lambda shape: predict_s(shape) * (3.0 if 3.0 < world.now_s < 4.0 else 1.0)
    target_s = 2 * predict_s(StepShape(8, 8, 8 * 1000, 0))
    for number in range(8):
        world.add(number, 100, max_tokens=10_000, ttft_s=5.0, inter_token_s=target_s)
    for number in range(8, 200):
        world.add(number, 4000)
    world.run(until_s=12.0)
    last_s = {number: world.gaps_s(number)[-300:] for number in range(8)}
    assert max(quantile(gaps_s, 0.95) for gaps_s in last_s.values()) <= target_s


def test_no_request_with_targets_joins_rows_whose_decoding_would_then_exceed_its_gap() -> None:
    world = World(
        prior=StepTimePrior(Coefficients(1e-3, 1e-6, 1e-3, 1e-9, 1e-9)), cost=lambda s: 1e-3 * (1 + s.num_rows)
    )
    for number in range(30):
        world.add(number, 10, max_tokens=50, ttft_s=10.0, inter_token_s=0.0105, when_infeasible=REFUSE)
    world.run()
    assert max(shape.num_rows for _, shape, _ in world.steps) <= 10
    assert {world.reason(number) for number in range(30)} == {EndReason.MAX_TOKENS}
    assert world.scheduler.stats().num_itl_infeasible_total > 0


TIGHT_S = 1.02 * StepTimeModel(H200).predict_s(StepShape(1, 1, 300, 0))  # alone a request can have it


def world_of_long_answers() -> World:
    world = World(max_steps_in_flight=2)
    for number in range(10):
        world.add(number, 200, max_tokens=2000)
    world.run(until_s=0.5)
    return world


def test_a_request_that_waits_for_its_own_gap_holds_up_no_others() -> None:
    world = world_of_long_answers()
    world.add(10, 200, max_tokens=5, ttft_s=1000.0, inter_token_s=TIGHT_S)
    world.add(11, 200, max_tokens=5)
    world.add(12, 200, max_tokens=5, ttft_s=2000.0)
    world.run()
    assert world.ttft_s(11) < 0.1
    assert world.ttft_s(12) < 0.1
    assert world.times_s[10][0] > max(world.ended_s[number] for number in range(10))
    assert max(world.gaps_s(10)) <= TIGHT_S
    assert 100 < world.scheduler.stats().num_itl_infeasible_total <= len(world.steps)


def test_an_answer_that_has_begun_does_not_wait_for_its_gap() -> None:
    world = world_of_long_answers()
    world.add(10, 200, max_tokens=5, inter_token_s=TIGHT_S, output_ids=[1, 1], has_moved=True)
    world.run()
    assert world.ttft_s(10) < 0.1


def test_a_gap_that_no_step_can_keep_does_not_stop_the_engine() -> None:
    world = World()
    for number in range(5):
        world.add(number, 300, max_tokens=20, ttft_s=5.0, inter_token_s=1e-6)
    world.run()
    assert {world.reason(number) for number in range(5)} == {EndReason.MAX_TOKENS}


def test_a_stream_whose_target_is_missed_leaves_time_to_prompts() -> None:
    world = World()
    world.add(1, 100, max_tokens=2000, ttft_s=1.0, inter_token_s=0.006)
    world.run(until_s=0.3)
    world.cost = lambda shape: 0.007 + StepTimeModel(H200).predict_s(shape)
    world.run(until_s=1.0)
    world.add(2, 4000)
    world.run(until_s=2.0)
    assert world.ttft_s(2) < 0.3  # 64 tokens in each step would take 0.8 s


def test_time_paused_by_the_client_is_not_late() -> None:
    world = World()
    request = world.add(1, 100, max_tokens=300, ttft_s=1.0, inter_token_s=0.02, token_credit=20)
    for _ in range(10):
        world.run()
        world.now_s += 5.0
        world.scheduler.grant_credit(RequestId(1), 20, world.now_s)
    world.run()
    assert request.pace is not None
    assert request.pace.num_late == 0
    assert request.pace.is_timed


@pytest.mark.parametrize("pacing", Pacing)
def test_nor_is_it_if_it_lost_its_blocks_meanwhile(pacing: Pacing) -> None:
    world = World(num_blocks=40, max_num_seqs=4, max_model_len=640)
    paused = world.add(1, 100, max_tokens=200, ttft_s=1.0, inter_token_s=0.05, pacing=pacing, token_credit=5)
    world.run()
    world.add(2, 630)  # needs the whole cache
    world.run()
    assert paused.num_preemptions == 1
    world.now_s += 10.0
    world.scheduler.grant_credit(RequestId(1), 195, world.now_s)
    world.run()
    assert world.reason(1) is EndReason.MAX_TOKENS
    assert paused.pace is not None
    assert paused.pace.num_late == 0
    assert paused.pace.is_timed
