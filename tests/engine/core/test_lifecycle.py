"""Time account of a request, computed by hand. Steps end at 1, 2, 3, ... s; each begins and ends at the same time."""

from collections.abc import Callable
from typing import Any

from chairlift.service.end_reason import EndReason
from engine.core.outputs import TimeAccount
from engine.core.request import Request, RequestId

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


def account(num_preemptions: int = 0, **seconds: float) -> TimeAccount:
    kinds = dict.fromkeys(("queued_s", "prefill_s", "decode_s", "paused_s", "preempted_s"), 0.0)
    return TimeAccount(**{**kinds, **seconds}, num_preemptions=num_preemptions)


def test_paused_time_runs_from_the_last_token_to_the_grant(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    request = make_request(1, 5, max_tokens=4, token_credit=2)
    engine.add(request)
    engine.run()  # tokens at 1 and 2 s
    engine.now_s = 10.0
    engine.scheduler.grant_credit(RequestId(1), 9, engine.now_s)
    engine.run()  # tokens at 11 and 12 s
    assert engine.answer(request).completion.time == account(queued_s=1.0, decode_s=3.0, paused_s=8.0)


def test_request_that_is_cancelled_while_paused_was_paused_until_then(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    request = make_request(1, 5, token_credit=1)
    engine.add(request)
    engine.run()
    engine.scheduler.cancel(RequestId(1), 7.0)
    engine.now_s = 50.0
    engine.run()
    assert engine.answer(request).completion.time == account(queued_s=1.0, paused_s=6.0)


def test_request_without_credit_from_the_start_is_paused_and_not_queued(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    request = make_request(1, 5, max_tokens=1, token_credit=0)
    engine.add(request)
    engine.scheduler.grant_credit(RequestId(1), 1, 3.0)
    engine.now_s = 3.0
    engine.run()
    assert engine.answer(request).completion.time == account(queued_s=1.0, paused_s=3.0)


def test_time_out_of_the_batch_is_preempted_and_not_prefill(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(num_blocks=8, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=2)
    first, second = make_request(1, [1] * 4, max_tokens=24), make_request(2, [2] * 16, max_tokens=1)
    engine.add(first, second)
    preempted_at_s = resumed_at_s = 0.0
    while engine.scheduler.has_work():
        engine.step()
        if second.num_preemptions and not preempted_at_s:
            preempted_at_s = engine.now_s
        if preempted_at_s and not resumed_at_s and second.num_computed_tokens:
            resumed_at_s = engine.now_s
    time = engine.answer(second).completion.time
    assert time.num_preemptions == 1
    assert time.preempted_s == resumed_at_s - preempted_at_s > 0
    assert time.decode_s == time.paused_s == 0
    assert time.queued_s + time.prefill_s + time.preempted_s == second.first_token_s


def test_time_is_reported_only_with_the_first_token_and_after_every_pause(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_num_batched_tokens=4)
    request = make_request(1, 8, max_tokens=9, token_credit=3)
    engine.add(request)
    told = {}
    for _ in range(20):
        if engine.now_s == 3.0:
            engine.scheduler.grant_credit(RequestId(1), 2, engine.now_s)  # it has credit for one more token
        if engine.now_s == 6.0:
            engine.now_s = 8.0
            engine.scheduler.grant_credit(RequestId(1), 9, engine.now_s)
        engine.launch()
        for output in engine.land():
            if output.time is not None:
                told[output.start_index] = output.time
    assert told == {
        0: account(queued_s=1.0, prefill_s=1.0),
        4: account(queued_s=1.0, prefill_s=1.0, decode_s=4.0),
        5: account(queued_s=1.0, prefill_s=1.0, decode_s=5.0, paused_s=2.0),
    }
    assert engine.reason(request) is EndReason.MAX_TOKENS
