"""The rules of a step: budget, chunks, admission, steps in flight."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.cache_groups import CacheGroups
from engine.core.request import Request
from engine.errors import InvalidRequest, QueueFull, RequestTooLong

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


class TestBudget:
    def test_prompt_is_split_when_the_budget_is_smaller(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_batched_tokens=10)
        request = make_request(1, 25, max_tokens=2)
        engine.add(request)
        assert engine.run() == [{1: 10}, {1: 10}, {1: 5}, {1: 1}]
        assert engine.is_solo_answer(request)

    def test_only_the_last_chunk_of_a_prompt_samples(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_num_batched_tokens=10)
        engine.add(make_request(1, 15))
        samples = []
        for _ in range(3):
            samples.append([row.samples for row in engine.launch().rows])
            engine.land()
        assert samples == [[False], [True], [True]]

    def test_one_token_rows_come_first_and_prompts_share_what_is_left(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_batched_tokens=12)
        engine.add(make_request(1, 3, max_tokens=9), make_request(2, 3, max_tokens=9))
        engine.step()
        engine.add(make_request(3, [2] * 16), make_request(4, [3] * 6))
        assert [list(engine.step().items()) for _ in range(3)] == [
            [(1, 1), (2, 1), (3, 10)],
            [(1, 1), (2, 1), (3, 6), (4, 4)],
            [(1, 1), (2, 1), (3, 1), (4, 2)],
        ]

    def test_long_prompt_never_stalls_those_already_riding(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_batched_tokens=8)
        rider = make_request(1, 2, max_tokens=20)
        engine.add(rider)
        engine.step()
        engine.add(make_request(2, [2] * 100, max_tokens=1))
        steps = engine.run()
        assert all(step[1] == 1 for step in steps[:19])
        assert len(rider.output_ids) == 20

    def test_a_chunk_cut_to_one_token_is_packed_with_the_one_token_rows(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_batched_tokens=5)
        engine.add(make_request(1, [2] * 4), make_request(2, [3] * 8))
        assert list(engine.step().items()) == [(2, 1), (1, 4)]

    def test_more_running_requests_than_the_budget_progress_in_order_of_admission(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_batched_tokens=2)
        requests = [make_request(i, 1, max_tokens=3) for i in range(5)]
        engine.add(*requests)
        engine.run(max_steps=20)
        assert all(engine.is_solo_answer(request) for request in requests)


class TestAdmission:
    def test_needs_a_slot(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_num_seqs=2)
        engine.add(*(make_request(i, 2, max_tokens=3) for i in range(3)))
        assert [step.keys() for step in engine.run()] == [{0, 1}, {0, 1}, {0, 1}, {2}, {2}, {2}]

    def test_needs_budget(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_num_batched_tokens=8)
        engine.add(make_request(1, 8), make_request(2, [2, 2]))
        engine.step()
        assert engine.scheduler.stats().num_waiting == 1
        assert engine.step() == {1: 1, 2: 2}

    def test_needs_blocks(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32)
        engine.add(make_request(1, 20, max_tokens=2), make_request(2, [2] * 20, max_tokens=2))
        assert [step.keys() for step in engine.run()] == [{1}, {1}, {2}, {2}]

    def test_head_of_the_queue_is_not_overtaken_while_it_waits_for_blocks(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32)
        engine.add(make_request(1, 12, max_tokens=8))
        engine.step()
        big = make_request(2, [2] * 28, max_tokens=2)
        engine.add(big, *(make_request(i, [3], max_tokens=1) for i in range(3, 9)))
        steps = engine.run()
        first_small = next(index for index, step in enumerate(steps) if 3 in step)
        assert next(index for index, step in enumerate(steps) if 2 in step) <= first_small

    def test_request_that_fills_the_whole_pool_is_served(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32, enable_prefix_caching=False)
        small, big = make_request(1, 3, max_tokens=10), make_request(2, 31, max_tokens=5)
        engine.add(small, big)
        engine.run()
        assert engine.reason(big) is EndReason.CONTEXT_FULL
        assert engine.is_solo_answer(small)

    def test_what_can_never_fit_is_rejected_with_its_numbers(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32)
        with pytest.raises(RequestTooLong, match=r"prompt has 32 tokens, max_model_len is 32 .*cache holds 32"):
            engine.add(make_request(1, 32))
        assert not engine.scheduler.has_work()

    def test_queue_is_bounded(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_waiting=2)
        engine.add(make_request(1, 1), make_request(2, 1))
        with pytest.raises(QueueFull, match="2 requests wait, max_waiting is 2"):
            engine.add(make_request(3, 1))
        engine.step()
        engine.add(make_request(3, 1))

    def test_empty_prompt_and_id_in_use_are_rejected(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        engine.add(make_request(1, 1))
        with pytest.raises(InvalidRequest, match="request id 1 is in use"):
            engine.add(make_request(1, 1))
        with pytest.raises(InvalidRequest, match="prompt has no tokens"):
            engine.add(make_request(2, []))

    def test_prefix_hits_are_not_computed_again_and_are_reported_once(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        first, second = make_request(1, [1] * 9, max_tokens=2), make_request(2, [1] * 10, max_tokens=2)
        engine.add(first)
        engine.run()
        engine.add(second)
        assert engine.run()[0] == {2: 2}
        assert (engine.answer(first).num_cached_tokens, engine.answer(second).num_cached_tokens) == (0, 8)
        assert engine.answer(second).completion.num_cached_tokens == 8
        stats = engine.scheduler.stats()
        assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (19, 8)

    def test_priority_admits_the_better_class_first(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(policy="priority", max_num_seqs=1)
        engine.add(*(make_request(i, 1, max_tokens=1, priority=priority) for i, priority in enumerate((2, 0, 1))))
        assert [list(step) for step in engine.run()] == [[1], [2], [0]]

    def test_static_takes_more_steps_than_fcfs_on_skewed_lengths(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        num_steps = {}
        for policy in ("fcfs", "static"):
            engine = make_engine(policy=policy, max_num_seqs=4)
            lengths = [40, 2, 2, 2] * 4
            requests = [make_request(i, 2, max_tokens=length) for i, length in enumerate(lengths)]
            engine.add(*requests)
            num_steps[policy] = len(engine.run())
            assert all(engine.is_solo_answer(request) for request in requests)
        assert num_steps["static"] == 4 * 40  # each batch lasts as long as its longest
        assert num_steps["fcfs"] < num_steps["static"] / 2


class TestTwoStepsInFlight:
    def test_next_row_is_planned_before_its_token_is_known(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_steps_in_flight=2)
        request = make_request(1, 5, max_tokens=6)
        engine.add(request)
        engine.launch()
        (row,) = engine.launch().rows
        assert (row.num_computed_tokens, row.num_scheduled_tokens, row.samples) == (5, 1, True)
        engine.land()
        assert (len(request.output_ids), request.num_pending_tokens) == (1, 1)

    def test_nothing_is_planned_beyond_max_tokens(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_steps_in_flight=2)
        engine.add(make_request(1, 5, max_tokens=1))
        engine.launch()
        assert engine.launch().rows == ()

    def test_row_behind_the_end_of_an_answer_is_dropped(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_steps_in_flight=2)
        free = make_request(1, 5, max_tokens=3, seed=3)
        engine.add(free)
        engine.run()
        request = make_request(2, 5, max_tokens=30, seed=3, stop_token_ids=(free.output_ids[0],))
        engine.add(request)
        engine.launch()
        engine.launch()
        (output,) = engine.land()
        assert output.completion is not None
        assert engine.scheduler.stats().num_free_blocks == 62  # the late row still uses them
        assert engine.land() == []
        assert engine.scheduler.stats().num_free_blocks == 64

    def test_no_more_plans_than_allowed(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_steps_in_flight=2)
        engine.launch()
        engine.launch()
        with pytest.raises(AssertionError, match="2 steps are in flight"):
            engine.launch()


class TestPipelineStages:
    def test_requests_are_divided_among_the_steps_in_flight(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_stages=3, max_steps_in_flight=3)
        engine.add(*(make_request(i, 2, max_tokens=20) for i in range(7)))
        engine.step()
        plans = [engine.launch() for _ in range(3)]
        assert [[row.request_id for row in plan.rows] for plan in plans] == [[0, 1, 2], [3, 4, 5], [6]]
        engine.land()
        assert [row.request_id for row in engine.launch().rows] == [0, 1, 2]

    def test_a_request_has_no_row_before_its_sample_is_known(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_stages=2, max_steps_in_flight=2)
        request = make_request(1, 5, max_tokens=6)
        engine.add(request)
        engine.launch()
        assert not engine.scheduler.has_work()
        assert engine.launch().rows == ()
        engine.land()
        assert engine.scheduler.has_work()
        engine.land()
        engine.run()
        assert engine.is_solo_answer(request)

    def test_chunks_of_a_prompt_follow_each_other(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(num_stages=3, max_steps_in_flight=3, max_num_batched_tokens=8)
        engine.add(make_request(1, 20))
        assert [row.num_scheduled_tokens for _ in range(3) for row in engine.launch().rows] == [8, 8, 4]

    def test_prompts_share_a_step_with_the_share_of_the_decodes(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_stages=2, max_steps_in_flight=2, max_num_batched_tokens=12)
        engine.add(*(make_request(i, 2, max_tokens=20) for i in range(3)))
        engine.step()
        engine.add(make_request(3, [2] * 30))
        plans = [engine.launch() for _ in range(2)]
        assert [[(row.request_id, row.num_scheduled_tokens) for row in plan.rows] for plan in plans] == [
            [(0, 1), (1, 1), (3, 10)],
            [(2, 1), (3, 11)],
        ]


class TestStats:
    def test_counts_load_and_totals(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_num_seqs=1, max_num_batched_tokens=8)
        engine.add(make_request(1, 20), make_request(2, 7))
        assert engine.scheduler.stats().num_waiting_prefill_tokens == 27
        engine.step()
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_waiting_prefill_tokens) == (1, 1, 12 + 7)
        assert (stats.num_free_blocks, stats.num_blocks) == (64 - 6, 64)
        engine.run()
        assert engine.scheduler.stats().num_generated_tokens_total == 8

    def test_blocks_are_those_of_all_layers_without_the_promised_ones(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        """The frontends take the product with the tokens of a block for the capacity."""
        groups = CacheGroups(num_full=1, num_windowed=3, window=8)
        engine = make_engine(num_blocks=130, max_num_batched_tokens=8, cache_groups=groups)
        assert (engine.scheduler.stats().num_free_blocks, engine.scheduler.stats().num_blocks) == (32, 32)
        engine.add(make_request(1, 60, max_tokens=1))
        engine.step()
        num_most = groups.most_blocks(60, 8, 4)  # of which it holds two in each group so far
        assert num_most == 15 + 3 * 6
        assert engine.scheduler.stats().num_free_blocks == (130 - num_most) // 4
        engine.run()
        assert engine.scheduler.stats().num_free_blocks == 32

    def test_same_calls_make_the_same_plans(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        def plans() -> list[Any]:
            engine = make_engine(num_blocks=12, max_model_len=40, max_num_batched_tokens=9)
            engine.add(*(make_request(i, 3 * i + 1, max_tokens=9) for i in range(9)))
            made = []
            while engine.scheduler.has_work():
                made.append(engine.launch())
                engine.land()
            return [replace(plan) for plan in made]

        assert plans() == plans()
