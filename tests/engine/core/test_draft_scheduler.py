"""What rows with drafts may take, and that nothing else about a request changes."""

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.draft_scheduler import DraftScheduler
from engine.core.drafts import DraftLimits
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request, RequestId

LIMITS = DraftLimits(4, 3, 1)
LOOP = [1, 2, 3, 4] * 4


@pytest.fixture
def engine(make_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine whose answers continue a loop of four tokens, so that drafts are right."""
    return looping(make_engine(drafts=LIMITS), monkeypatch)


def looping(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engine.model, "sample", lambda _chain, position, _num, _params: 1 + position % 4)
    return engine


def drafts(plan: SchedulerOutput) -> dict[RequestId, tuple[int, ...]]:
    rows = plan.rows[len(plan.rows) - len(plan.drafts) :]
    return {row.request_id: draft for row, draft in zip(rows, plan.drafts, strict=True)}


def test_a_right_draft_yields_its_tokens_and_one_more(engine: Any, make_request: Callable[..., Request]) -> None:
    request = make_request(0, LOOP, max_tokens=20)
    engine.add(request)
    engine.step()
    plan = engine.launch()
    assert drafts(plan) == {0: (2, 3, 4, 1)}
    assert (plan.num_tokens, plan.rows[0].num_scheduled_tokens) == (5, 5)
    (output,) = engine.land()
    assert (output.start_index, output.token_ids) == (1, (2, 3, 4, 1, 2))
    assert request.num_computed_tokens == request.num_tokens - 1 == 21
    engine.run()
    assert engine.answer(request).token_ids == [1, 2, 3, 4] * 5
    stats = engine.scheduler.stats()
    assert (stats.num_drafts_total, stats.num_draft_tokens_total, stats.num_accepted_tokens_total) == (4, 15, 15)
    assert stats.num_generated_tokens_total == 20


def test_a_wrong_draft_yields_one_token(
    make_engine: Callable[..., Any], make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(drafts=LIMITS)
    monkeypatch.setattr(engine.model, "sample", lambda _chain, position, _num, _params: 1 if position == 16 else 7)
    request = make_request(0, LOOP, max_tokens=2)
    engine.add(request)
    engine.step()
    assert drafts(engine.launch()) == {}  # max_tokens leaves no token but the one that is drawn anyway
    engine.land()
    assert engine.answer(request).token_ids == [1, 7]
    longer = make_request(1, LOOP, max_tokens=6)
    engine.add(longer)
    engine.step()
    assert drafts(engine.launch()) == {1: (2, 3, 4, 1)}
    engine.land()
    assert engine.answer(longer).token_ids == [1, 7]
    assert longer.num_computed_tokens == 17
    engine.run()
    assert engine.answer(longer).token_ids == [1, 7, 7, 7, 7, 7]


def test_drafts_end_with_the_credit_and_the_request_pauses(engine: Any, make_request: Callable[..., Request]) -> None:
    request = make_request(0, LOOP, max_tokens=20, token_credit=4)
    engine.add(request)
    engine.step()
    assert drafts(engine.launch()) == {0: (2, 3)}
    (output,) = engine.land()
    assert output.token_ids == (2, 3, 4)
    assert output.time is not None
    assert request.token_credit == 0
    assert not engine.scheduler.has_work()


def test_an_end_token_in_a_draft_ends_the_answer(engine: Any, make_request: Callable[..., Request]) -> None:
    request = make_request(0, LOOP, max_tokens=20, stop_token_ids=(3,), min_tokens=4)
    engine.add(request)
    engine.run()
    assert engine.answer(request).token_ids == [1, 2, 3, 4, 1, 2, 3]
    assert engine.reason(request) is EndReason.STOP_TOKEN


def test_confirmed_tokens_enter_the_prefix_cache(engine: Any, make_request: Callable[..., Request]) -> None:
    """Those of 20 computed ones, although the last rows computed them as drafts; not one that was rejected."""
    engine.add(make_request(0, LOOP, max_tokens=6))
    engine.run()
    later = make_request(1, [*LOOP, 1, 2, 3, 4, 1, 2, 3], max_tokens=1)
    engine.add(later)
    engine.run()
    assert later.num_cached_tokens == 20


@pytest.mark.parametrize(("num_requests", "num_drafted"), [(4, 4 * 4), (15, 17), (16, 16), (20, 12), (31, 1), (32, 0)])
def test_drafts_use_all_that_is_left_and_take_turns(
    make_engine: Callable[..., Any],
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
    num_requests: int,
    num_drafted: int,
) -> None:
    engine = looping(
        make_engine(drafts=LIMITS, max_num_seqs=32, max_num_batched_tokens=1000, num_blocks=1000), monkeypatch
    )
    num_lookups = 0

    def propose(*args: Any) -> tuple[int, ...]:
        nonlocal num_lookups
        num_lookups += 1
        return (2, 3, 4, 1)

    monkeypatch.setattr("engine.core.drafts.PromptLookup.propose", propose)
    engine.add(*(make_request(index, LOOP, max_tokens=100) for index in range(num_requests)))
    engine.step()
    drafted = set()
    for _ in range(num_requests):
        plan = engine.launch()
        assert sum(map(len, plan.drafts)) == num_drafted
        assert max(map(len, plan.drafts), default=0) - min(map(len, drafts(plan).values()), default=0) <= 1
        drafted |= set(drafts(plan))
        engine.land()
    assert drafted == (set(range(num_requests)) if num_drafted else set())
    assert num_lookups == (num_requests**2 if num_drafted else 0)


def test_there_are_no_drafts_beside_prompts_and_waiting_requests(
    make_engine: Callable[..., Any], make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = looping(make_engine(drafts=LIMITS, max_num_seqs=5, max_num_batched_tokens=30), monkeypatch)
    requests = [make_request(index, LOOP, max_tokens=30) for index in range(6)]
    engine.add(*requests)
    while engine.scheduler.stats().num_waiting:
        assert not engine.launch().drafts
        engine.land()
    engine.add(make_request(6, 60, max_tokens=8))
    num_steps = 0
    while engine.scheduler.has_work():
        is_busy = engine.scheduler.stats().num_waiting or any(
            request.num_tokens - request.num_computed_tokens > 1 for request in engine.scheduler._running.values()
        )
        plan = engine.launch()
        assert not (plan.drafts and is_busy)
        engine.land()
        num_steps += bool(plan.drafts)
    assert num_steps > 3


def test_drafts_share_what_a_step_has_left(
    make_engine: Callable[..., Any], make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 positions with logits 3 are taken; of 5 others each request gets one, and two get a second one."""
    engine = looping(make_engine(drafts=LIMITS), monkeypatch)
    engine.add(*(make_request(index, LOOP, max_tokens=30) for index in range(3)))
    engine.step()
    assert sorted(map(len, drafts(engine.launch()).values())) == [1, 2, 2]
    engine.land()
    tight = looping(make_engine(drafts=LIMITS, max_num_batched_tokens=3), monkeypatch)
    tight.add(make_request(0, LOOP, max_tokens=30))
    for _ in range(5):
        assert tight.step() == {0: 3}
    assert drafts(tight.launch()) == {0: (1, 2)}  # in the row of the last prompt token


def test_a_draft_takes_no_block_that_a_running_request_may_need(
    make_engine: Callable[..., Any], make_request: Callable[..., Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 + 1 tokens in 5 of 6 blocks of 4 the last block stays free, for the next token of the request."""
    engine = looping(make_engine(drafts=LIMITS, num_blocks=6, max_model_len=24), monkeypatch)
    engine.add(make_request(0, LOOP, max_tokens=8))
    engine.step()
    assert drafts(engine.launch()) == {0: (2, 3, 4)}
    engine.land()


@pytest.mark.parametrize(
    "fields",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.1}, {"frequency_penalty": -0.1}, {"top_logprobs": 0},
     {"constraint": object()}],
)  # fmt: skip
def test_requests_that_depend_on_their_tokens_otherwise_have_no_drafts(
    engine: Any, make_request: Callable[..., Request], fields: dict[str, Any]
) -> None:
    engine.add(make_request(0, LOOP, **fields), make_request(1, LOOP))
    engine.step()
    assert drafts(engine.launch()).keys() == {1}
    engine.land()


def test_a_cancelled_request_yields_nothing_and_leaves_nothing(
    engine: Any, make_request: Callable[..., Request]
) -> None:
    request = make_request(0, LOOP, max_tokens=20)
    engine.add(request)
    engine.step()
    assert engine.launch().drafts
    engine.scheduler.cancel(RequestId(0), engine.now_s)
    (output,) = engine.land()
    assert output.token_ids == ()
    assert isinstance(engine.scheduler, DraftScheduler)
    assert not engine.scheduler._lookups


def test_a_request_that_becomes_limited_meanwhile_pauses(engine: Any, make_request: Callable[..., Request]) -> None:
    request = make_request(0, LOOP, max_tokens=20)
    engine.add(request)
    engine.step()
    assert engine.launch().drafts
    engine.scheduler.grant_credit(RequestId(0), 2, engine.now_s)
    (output,) = engine.land()
    assert len(output.token_ids) == 5
    assert request.token_credit == -3
    assert not engine.scheduler.has_work()
    engine.scheduler.grant_credit(RequestId(0), 100, engine.now_s)
    engine.run()
    assert engine.answer(request).token_ids == [1, 2, 3, 4] * 5


def test_a_failure_behind_the_first_token_counts_when_decoding_gets_there(
    engine: Any, make_request: Callable[..., Request]
) -> None:
    request = make_request(0, LOOP, max_tokens=20)
    engine.add(request)
    engine.failures[0] = 19
    engine.run()
    assert engine.answer(request).token_ids == [1, 2, 3, 4]
    assert engine.reason(request) is EndReason.ENGINE_ERROR
