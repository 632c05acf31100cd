"""How requests end, and how those go on that come with output from elsewhere."""

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.outputs import ModelRunnerOutput
from engine.core.request import Request, RequestId
from engine.errors import QueueFull

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


class TestEnds:
    def test_max_tokens(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        request = make_request(1, 5, max_tokens=3)
        engine.add(request)
        engine.run()
        completion = engine.answer(request).completion
        assert (completion.reason, completion.num_prompt_tokens, completion.num_output_tokens) == (
            EndReason.MAX_TOKENS,
            5,
            3,
        )

    def test_stop_token_is_part_of_the_output_and_named(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        free = make_request(1, 5, max_tokens=30, seed=3)
        engine.add(free)
        engine.run()
        stop_id = free.output_ids[10]
        request = make_request(2, 5, max_tokens=30, seed=3, stop_token_ids=(stop_id,))
        engine.add(request)
        engine.run()
        completion = engine.answer(request).completion
        assert (completion.reason, completion.stop_token_id) == (EndReason.STOP_TOKEN, stop_id)
        assert engine.answer(request).token_ids == free.output_ids[: free.output_ids.index(stop_id) + 1]

    def test_times_are_measured_from_arrival_to_first_step_to_first_token(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_num_seqs=1, max_num_batched_tokens=4)
        request = make_request(2, 12, max_tokens=1)
        engine.add(make_request(1, 1, max_tokens=2), request)
        engine.run()  # steps at 1, 2, ... s: the first request takes two, then three chunks
        completion = engine.answer(request).completion
        assert (completion.time.queued_s, completion.time.prefill_s) == (3.0, 2.0)

    @pytest.mark.parametrize("runs", [False, True])
    def test_deadline_ends_waiting_and_running_requests(
        self, make_engine: MakeEngine, make_request: MakeRequest, runs: bool
    ) -> None:
        engine = make_engine(max_num_seqs=1)
        if not runs:
            engine.add(make_request(1, 1, max_tokens=9))
        request = make_request(2, 1, max_tokens=9, deadline_s=3.0)
        engine.add(request)
        assert engine.scheduler.next_deadline_s == 3.0
        engine.step()
        engine.step()
        assert engine.reason(request) is None
        assert 2 not in engine.step()
        assert engine.reason(request) is EndReason.DEADLINE
        assert len(request.output_ids) == (2 if runs else 0)
        assert engine.scheduler.next_deadline_s is None

    @pytest.mark.parametrize("runs", [False, True])
    def test_time_budget_ends_waiting_and_running_requests_with_what_there_is(
        self, make_engine: MakeEngine, make_request: MakeRequest, runs: bool
    ) -> None:
        engine = make_engine(max_num_seqs=1)
        if not runs:
            engine.add(make_request(1, 1, max_tokens=9))
        request = make_request(2, 1, max_tokens=9, deadline_s=5.0, budget_end_s=3.0)
        engine.add(request)
        engine.step()
        engine.step()
        assert engine.reason(request) is None
        assert 2 not in engine.step()
        completion = engine.answer(request).completion
        assert (completion.reason, completion.num_output_tokens) == (EndReason.TIME_BUDGET, 2 if runs else 0)
        assert sum(completion.time[:5]) == 3.0
        assert completion.time.queued_s == (1.0 if runs else 3.0)

    def test_request_without_time_left_completes_without_running_or_waiting(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_waiting=0)
        request = make_request(1, 1, budget_end_s=0.0)
        engine.add(request)
        assert engine.step() == {}
        completion = engine.answer(request).completion
        assert (completion.reason, completion.num_output_tokens) == (EndReason.TIME_BUDGET, 0)

    def test_moved_request_finds_the_queue_never_full(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine(max_num_seqs=1, max_waiting=0)
        with pytest.raises(QueueFull):
            engine.add(make_request(1, 4))
        engine.add(*(make_request(number, 4, max_tokens=2, has_moved=True) for number in (2, 3)))
        engine.run()
        assert engine.scheduler.stats().num_generated_tokens_total == 4

    @pytest.mark.parametrize("runs", [False, True])
    def test_cancel_frees_everything_at_once_and_completes_with_the_next_update(
        self, make_engine: MakeEngine, make_request: MakeRequest, runs: bool
    ) -> None:
        engine = make_engine()
        request = make_request(1, 9)
        engine.add(request)
        if runs:
            engine.step()
        engine.scheduler.cancel(RequestId(1), engine.now_s)
        engine.scheduler.cancel(RequestId(1), engine.now_s)  # the second one is ignored
        engine.scheduler.cancel(RequestId(99), engine.now_s)
        stats = engine.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, 64)
        assert engine.scheduler.has_work()
        plan = engine.launch()
        assert (plan.rows, plan.removed_request_ids) == ((), (1,) if runs else ())
        engine.land()
        completion = engine.answer(request).completion
        assert (completion.reason, completion.num_cached_tokens) == (EndReason.CANCELLED, 0)
        assert not engine.scheduler.has_work()

    def test_cancel_in_flight_defers_the_blocks_and_drops_the_late_row(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        request = make_request(1, 9)
        engine.add(request)
        engine.launch()
        engine.scheduler.cancel(RequestId(1), engine.now_s)
        assert engine.scheduler.stats().num_free_blocks == 61
        outputs = engine.land()
        assert [output.token_ids for output in outputs] == [()]
        assert engine.scheduler.stats().num_free_blocks == 64

    def test_cancel_may_name_its_reason(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        request = make_request(1, 9)
        engine.add(request)
        engine.scheduler.cancel(RequestId(1), engine.now_s, EndReason.DEADLINE)
        engine.step()
        assert engine.reason(request) is EndReason.DEADLINE

    def test_failed_row_ends_its_request_alone_and_is_never_shared(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        bad, good = make_request(1, [1] * 9), make_request(2, [2] * 9)
        engine.failures[1] = 8
        engine.add(bad, good)
        engine.run()
        completion = engine.answer(bad).completion
        assert (completion.reason, completion.detail) == (EndReason.ENGINE_ERROR, "boom")
        assert engine.is_solo_answer(good)
        twin = make_request(3, [1] * 9)
        engine.add(twin)
        engine.run()
        assert engine.answer(twin).num_cached_tokens == 0
        assert engine.is_solo_answer(twin)

    def test_logprobs_come_with_their_tokens(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        with_top, chosen_only, without = (
            make_request(1, 3, top_logprobs=2),
            make_request(2, 3, top_logprobs=0),
            make_request(3, 3),
        )
        engine.add(with_top, chosen_only, without)
        engine.run()
        assert [len(logprobs.top_ids) for logprobs in engine.answer(with_top).logprobs] == [2] * 4
        assert [logprobs.top_ids for logprobs in engine.answer(chosen_only).logprobs] == [()] * 4
        assert engine.answer(without).logprobs == []

    def test_the_result_of_another_plan_is_rejected(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        plan = engine.scheduler.schedule(0.0)
        with pytest.raises(AssertionError, match="step 7 for plan 1, expected step 1"):
            engine.scheduler.update(plan, ModelRunnerOutput(7, (), {}, {}), 0.0)


class TestContinuation:
    def test_counts_and_indices_go_on(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        whole = make_request(1, 6, max_tokens=9, seed=5)
        engine = make_engine(enable_prefix_caching=False)
        engine.add(whole)
        engine.run()
        continued = make_request(2, 6, max_tokens=9, seed=5, output_ids=whole.output_ids[:4])
        engine.add(continued)
        plan = engine.launch()
        assert (plan.new_requests[0].num_prompt_tokens, len(plan.new_requests[0].token_ids)) == (6, 10)
        (output,) = engine.land()
        assert output.start_index == 4
        engine.run()
        assert continued.output_ids == whole.output_ids
        assert engine.answer(continued).completion.num_output_tokens == 9

    def test_prefix_hits_in_the_earlier_output_are_not_counted_as_prompt(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        whole = make_request(1, 6, max_tokens=9, seed=5)
        engine.add(whole)
        engine.run()
        continued = make_request(2, 6, max_tokens=10, seed=5, output_ids=list(whole.output_ids))
        engine.add(continued)
        assert engine.run()[0] == {2: 3}  # 12 of 15 tokens are there
        assert engine.answer(continued).num_cached_tokens == 6

    @pytest.mark.parametrize(
        ("output_ids", "fields", "reason", "stop_token_id"),
        [
            ([1, 2, 3], {"max_tokens": 3}, EndReason.MAX_TOKENS, None),
            ([1, 2, 3, 4], {"max_tokens": 3}, EndReason.MAX_TOKENS, None),
            ([1, 0], {"max_tokens": 9}, EndReason.END_TOKEN, 0),
            ([1, 5], {"max_tokens": 9, "stop_token_ids": (5,)}, EndReason.STOP_TOKEN, 5),
            ([1, 2], {"max_tokens": 9}, EndReason.CONTEXT_FULL, None),
        ],
    )
    def test_answer_that_is_already_over_completes_without_running(
        self,
        make_engine: MakeEngine,
        make_request: MakeRequest,
        output_ids: list[int],
        fields: dict[str, Any],
        reason: EndReason,
        stop_token_id: int | None,
    ) -> None:
        full = reason is EndReason.CONTEXT_FULL
        engine = make_engine(max_model_len=8 if full else 128, max_waiting=0)
        request = make_request(1, 6, output_ids=list(output_ids), **fields)
        engine.add(request)
        assert engine.step() == {}
        completion = engine.answer(request).completion
        assert (completion.reason, completion.stop_token_id) == (reason, stop_token_id)
        assert completion.num_output_tokens == len(output_ids)
        assert not engine.scheduler.has_work()
