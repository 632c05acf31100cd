"""Preemption when blocks run out: the choice of the victim, its recomputation, and bounds."""

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.plan import PlanBuilder
from engine.core.request import Request, RequestId, RequestStatus
from engine.core.scheduler import Scheduler

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


def run_until_preemption(engine: Any) -> None:
    while not engine.scheduler.stats().num_preemptions_total:
        assert engine.scheduler.has_work()
        engine.step()


def test_preempted_request_keeps_its_output_and_is_recomputed(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    requests = [make_request(i, [i] * 11, max_tokens=12) for i in (1, 2)]
    engine.add(*requests)
    run_until_preemption(engine)
    (victim,) = [request for request in requests if request.status is RequestStatus.PREEMPTED]
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert len(victim.output_ids) > 0
    engine.run()
    assert all(engine.is_solo_answer(request) for request in requests)
    assert engine.answer(victim).completion.time.num_preemptions == 1
    assert engine.scheduler.stats().num_recomputed_tokens_total == victim.num_discarded_tokens > 11


def test_a_request_preempted_in_the_step_that_admits_it_never_reaches_the_runner(
    monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    """As under `slo`, where best effort may be admitted before the chunks of prompts on time."""
    admit = Scheduler._admit

    def admit_and_preempt(self: Scheduler, batch: PlanBuilder) -> None:
        admit(self, batch)
        if not self._totals.num_preemptions:
            self._preempt(self._requests[RequestId(2)], batch)

    monkeypatch.setattr(Scheduler, "_admit", admit_and_preempt)
    engine = make_engine()
    requests = [make_request(i, [i] * 11, max_tokens=3) for i in (1, 2)]
    engine.add(*requests)
    engine.run()
    assert [request.num_preemptions for request in requests] == [0, 1]
    assert all(engine.is_solo_answer(request) for request in requests)


def test_recompute_comes_mostly_from_the_prefix_cache(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48)
    requests = [make_request(i, [i] * 22, max_tokens=8) for i in (1, 2)]
    engine.add(*requests)
    run_until_preemption(engine)
    (victim,) = [request for request in requests if request.status is RequestStatus.PREEMPTED]
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions_total == 1
    assert stats.num_recomputed_tokens_total < victim.num_discarded_tokens / 2


def test_lowest_class_yields_first(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48, policy="priority")
    requests = [make_request(i, [i] * 11, max_tokens=12, priority=priority) for i, priority in ((1, 0), (2, 5), (3, 1))]
    engine.add(*requests)
    run_until_preemption(engine)
    assert [request.num_preemptions for request in requests] == [0, 1, 0]


def test_better_class_never_yields_to_a_worse_one(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, policy="priority", enable_prefix_caching=False)
    better = make_request(1, [1] * 9, max_tokens=12, priority=0)  # loses less
    worse = make_request(2, [2] * 15, max_tokens=12, priority=1)
    engine.add(better, worse)
    engine.run()
    assert better.num_preemptions == 0
    assert worse.num_preemptions > 0
    assert engine.is_solo_answer(worse)


def test_within_a_class_the_request_with_the_least_to_recompute_is_preempted(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48, enable_prefix_caching=False)
    requests = [make_request(1, [1] * 19), make_request(2, [2] * 6), make_request(3, [3] * 15)]
    for request in requests:
        request.params = make_request(0, 1, max_tokens=20).params
    engine.add(*requests)
    run_until_preemption(engine)
    assert [request.num_preemptions for request in requests] == [0, 1, 0]


def test_cached_tokens_are_not_lost_and_do_not_count(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=12, max_model_len=48)
    # When blocks run out, the first has just filled its seventh: all 28 tokens are published. The second misses two of
    # 18.
    requests = [make_request(1, [1] * 24, max_tokens=20), make_request(2, [2] * 14, max_tokens=20)]
    engine.add(*requests)
    run_until_preemption(engine)
    assert [request.num_preemptions for request in requests] == [1, 0]
    assert requests[0].num_discarded_tokens == 28


def test_the_cheapest_request_is_preempted_itself(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    big, small = make_request(1, [1] * 21, max_tokens=3), make_request(2, [2] * 7, max_tokens=8)
    engine.add(big, small)
    run_until_preemption(engine)
    assert (big.num_preemptions, small.num_preemptions) == (0, 1)
    engine.run()
    assert engine.is_solo_answer(small)


def test_preempted_request_keeps_its_place_ahead_of_later_ones(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
    requests = [make_request(i, [i] * 11, max_tokens=12) for i in (1, 2)]
    late = make_request(3, [3], max_tokens=1)
    engine.add(*requests)
    engine.step()
    run_until_preemption(engine)
    engine.add(late)
    (victim,) = [request for request in requests if request.status is RequestStatus.PREEMPTED]
    steps = engine.run()
    assert next(i for i, step in enumerate(steps) if victim.request_id in step) <= next(
        i for i, step in enumerate(steps) if 3 in step
    )


def test_the_row_of_a_request_preempted_in_the_same_plan_is_removed(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=4, max_model_len=16, enable_prefix_caching=False)
    first, second = make_request(1, [1] * 2, max_tokens=9), make_request(2, [2] * 7, max_tokens=6)
    engine.add(first, second)
    plans = []
    while not engine.scheduler.stats().num_preemptions_total:
        plans.append(engine.launch())
        engine.land()
    assert first.num_preemptions == 1  # was planned before the second one asked for its block
    assert [row.request_id for row in plans[-1].rows] == [2]
    assert plans[-1].removed_request_ids == (1,)
    assert plans[-1].num_tokens == 1
    engine.run()
    assert engine.is_solo_answer(first)


def test_no_request_is_preempted_for_blocks_that_steps_in_flight_will_release(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_steps_in_flight=2, enable_prefix_caching=False)
    engine.add(
        make_request(1, [1] * 15, max_tokens=8),
        make_request(2, [2] * 2, max_tokens=20),
        make_request(4, [4] * 9, max_tokens=2),
    )
    engine.launch()
    engine.launch()
    engine.land()
    engine.scheduler.cancel(RequestId(2), engine.now_s)  # its only block is used by the step in flight
    engine.add(make_request(3, [3], max_tokens=1))
    assert engine.launch().rows == ()  # request 1 waits for that block; the last token of request 4 is in flight
    engine.land()
    assert [row.request_id for row in engine.launch().rows] == [1, 3]
    assert engine.scheduler.stats().num_preemptions_total == 0


def test_preempted_request_accepts_its_late_token_and_is_not_resumed_before(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_steps_in_flight=2, enable_prefix_caching=False)
    requests = [make_request(i, [i] * 11, max_tokens=12) for i in (1, 2)]
    engine.add(*requests)
    engine.launch()
    while not engine.scheduler.stats().num_preemptions_total:
        engine.launch()
        if not engine.scheduler.stats().num_preemptions_total:
            engine.land()
    (victim,) = [request for request in requests if request.status is RequestStatus.PREEMPTED]
    assert victim.num_pending_tokens == 1
    num_known = len(victim.output_ids)
    engine.land()
    assert (len(victim.output_ids), victim.num_pending_tokens) == (num_known + 1, 0)
    while engine.scheduler.has_work():
        engine.launch()
        if len(engine.plans) == 2:
            engine.land()
    assert all(engine.is_solo_answer(request) for request in requests)


def test_late_token_of_a_preempted_request_may_end_it(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_steps_in_flight=2, enable_prefix_caching=False)
    rider, leaver = make_request(1, [1] * 15, max_tokens=9), make_request(2, [2] * 7, max_tokens=6)
    engine.add(rider, leaver)
    engine.launch()
    for _ in range(6):
        engine.launch()
        if leaver.status is not RequestStatus.PREEMPTED:
            engine.land()
    assert (leaver.status, len(leaver.output_ids)) == (RequestStatus.PREEMPTED, 5)  # its last token is on its way
    engine.land()
    assert engine.reason(leaver) is EndReason.MAX_TOKENS
    assert engine.is_solo_answer(leaver)


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_preemptions_per_request_are_bounded_and_everyone_ends(
    make_engine: MakeEngine, make_request: MakeRequest, max_preemptions: int, max_steps_in_flight: int
) -> None:
    engine = make_engine(
        num_blocks=9,
        max_model_len=36,
        max_preemptions=max_preemptions,
        max_steps_in_flight=max_steps_in_flight,
        enable_prefix_caching=False,
    )
    requests = [make_request(i, [i % 8] * (1 + i % 5), max_tokens=30) for i in range(12)]
    engine.add(*requests)
    for _ in range(2000):
        if not engine.scheduler.has_work():
            break
        engine.launch()
        if len(engine.plans) == max_steps_in_flight:
            engine.land()
    while engine.plans:
        engine.land()
    assert all(engine.is_solo_answer(request) for request in requests)
    assert max(request.num_preemptions for request in requests) <= max_preemptions
    if max_preemptions:
        assert engine.scheduler.stats().num_preemptions_total > 0


def test_no_request_is_admitted_into_blocks_of_a_preempted_one_in_the_same_step(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, policy="priority", enable_prefix_caching=False)
    rider, yielder = make_request(1, [1] * 12, max_tokens=9), make_request(2, [2] * 11, max_tokens=12, priority=1)
    engine.add(rider, yielder)
    for _ in range(5):
        engine.step()
    engine.add(make_request(3, [3], max_tokens=1))
    assert engine.step() == {1: 1}
    assert yielder.num_preemptions == 1
    assert engine.step() == {1: 1, 3: 1}


def test_request_at_its_bound_is_never_chosen(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_preemptions=1, enable_prefix_caching=False)
    at_bound = make_request(1, [1] * 5, max_tokens=13, num_preemptions=1)
    other = make_request(2, [2] * 9, max_tokens=13)  # loses more, and yields all the same
    engine.add(at_bound, other)
    run_until_preemption(engine)
    assert (at_bound.num_preemptions, other.num_preemptions) == (1, 1)
    engine.run()
    assert engine.is_solo_answer(other)


def test_request_at_its_bound_is_admitted_only_with_room_for_all_it_may_need(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_preemptions=0)
    engine.add(*(make_request(i, [i] * 5, max_tokens=13) for i in (1, 2)))
    assert engine.step() == {1: 5}
    assert engine.scheduler.stats().num_free_blocks == 3  # at most 17 tokens are attended to: 5 blocks
    engine.run()
    assert engine.scheduler.stats().num_preemptions_total == 0
