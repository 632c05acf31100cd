"""Requests without credit are paused: they keep their blocks and do not block others."""

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.request import Request, RequestId, RequestStatus

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


class TestCredit:
    def test_request_is_paused_when_its_credit_is_used_up_and_goes_on_with_more(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        request = make_request(1, 5, max_tokens=6, token_credit=2)
        engine.add(request)
        engine.run()
        assert request.status is RequestStatus.PAUSED
        assert (len(request.output_ids), engine.scheduler.stats().num_free_blocks) == (2, 62)
        engine.scheduler.grant_credit(RequestId(1), 3, engine.now_s)
        engine.run()
        assert len(request.output_ids) == 5
        engine.scheduler.grant_credit(RequestId(1), 3, engine.now_s)
        engine.run()
        assert engine.is_solo_answer(request)

    def test_first_grant_limits_an_unlimited_request(self, make_engine: MakeEngine, make_request: MakeRequest) -> None:
        engine = make_engine()
        request = make_request(1, 5, max_tokens=20)
        engine.add(request)
        engine.step()
        engine.scheduler.grant_credit(RequestId(1), 2, engine.now_s)
        engine.run()
        assert len(request.output_ids) == 3

    def test_grant_to_a_request_that_has_ended_is_ignored(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        engine.add(make_request(1, 5, max_tokens=1))
        engine.run()
        engine.scheduler.grant_credit(RequestId(1), 3, engine.now_s)
        assert not engine.scheduler.has_work()

    def test_samples_in_flight_count_against_the_credit(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(max_steps_in_flight=2)
        request = make_request(1, 5, max_tokens=20, token_credit=1)
        engine.add(request)
        assert len(engine.launch().rows) == 1
        assert len(engine.launch().rows) == 0

    def test_a_queued_request_without_credit_does_not_block_others(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine()
        stalled = make_request(1, 5, token_credit=0)
        engine.add(stalled, make_request(2, 5))
        assert all(1 not in step for step in engine.run())
        engine.scheduler.grant_credit(RequestId(1), 4, engine.now_s)
        engine.run()
        assert engine.is_solo_answer(stalled)

    @pytest.mark.parametrize("max_steps_in_flight", [1, 2])
    def test_paused_requests_are_preempted_when_no_other_request_can_run(
        self, make_engine: MakeEngine, make_request: MakeRequest, max_steps_in_flight: int
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32, max_preemptions=0, max_steps_in_flight=max_steps_in_flight)
        paused, waiting = make_request(1, 20, max_tokens=8, token_credit=1), make_request(2, [2] * 20, max_tokens=2)
        engine.add(paused, waiting)
        for _ in range(10):
            engine.launch()
            if len(engine.plans) == max_steps_in_flight:
                engine.land()
        assert engine.is_solo_answer(waiting)
        assert (paused.status, paused.num_preemptions) == (RequestStatus.PREEMPTED, 1)
        while engine.plans:
            engine.land()
        engine.scheduler.grant_credit(RequestId(1), 99, engine.now_s)
        engine.run()
        assert engine.is_solo_answer(paused)

    def test_paused_requests_keep_their_blocks_while_others_run(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32)
        paused = make_request(1, 8, max_tokens=8, token_credit=1)
        engine.add(paused, make_request(2, [2] * 4, max_tokens=8), make_request(3, [3] * 20, max_tokens=1))
        while engine.scheduler.stats().num_running == 2:
            engine.step()
            assert paused.status in (RequestStatus.RUNNING, RequestStatus.PAUSED)

    def test_paused_requests_keep_their_blocks_when_steps_in_flight_will_release_enough(
        self, make_engine: MakeEngine, make_request: MakeRequest
    ) -> None:
        engine = make_engine(num_blocks=8, max_model_len=32, max_steps_in_flight=2)
        paused = make_request(1, 8, max_tokens=8, token_credit=1)
        engine.add(paused, make_request(2, [2] * 13, max_tokens=8))
        engine.launch()
        engine.launch()
        engine.land()
        engine.scheduler.cancel(RequestId(2), engine.now_s)
        engine.add(make_request(3, [3] * 13, max_tokens=1))
        assert engine.launch().rows == ()
        engine.land()
        assert [row.request_id for row in engine.launch().rows] == [3]
        assert paused.status is RequestStatus.PAUSED
