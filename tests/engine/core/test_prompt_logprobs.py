"""Log-probabilities of a prompt are worked off in the logits that others leave: no more memory, no one starved."""

from collections.abc import Callable
from typing import Any

import pytest

from chairlift.service.end_reason import EndReason
from engine.core.outputs import ScheduledRow
from engine.core.request import Request

MakeEngine = Callable[..., Any]
MakeRequest = Callable[..., Request]


def widths(engine: Any) -> dict[int, tuple[int, int]]:
    """One step. Returns by request its tokens and how many prompt positions of them want logits."""
    plan = engine.launch()
    engine.land()
    return {row.request_id: (row.num_scheduled_tokens, row.num_prompt_logits) for row in plan.rows}


def test_chunks_are_as_wide_as_there_are_logits_left(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_seqs=4)
    scored = make_request(1, 10, prompt_logprobs=0)
    engine.add(scored, make_request(2, 30, max_tokens=9))
    # The first takes all four; the second stops before its last token, which would need a fifth.
    assert widths(engine) == {1: (4, 4), 2: (29, 0)}
    assert widths(engine) == {2: (1, 0), 1: (3, 3)}
    assert widths(engine) == {2: (1, 0), 1: (3, 2)}  # position 9 shows no prompt token, and samples
    assert len(scored.output_ids) == 1
    assert len(engine.answer(scored).prompt_logprobs) == 9


def test_positions_that_want_logits_are_those_before_prompt_tokens() -> None:
    row = ScheduledRow(1, 6, 4, (), True, 3)  # type: ignore[arg-type]
    assert list(row.prompt_logits(8)) == [4, 5, 6]
    assert list(row.prompt_logits(10)) == [6, 7, 8]
    assert list(row.prompt_logits(30)) == [7, 8, 9]


def test_with_all_slots_in_use_it_progresses_one_token_per_step(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_num_seqs=3)
    decoders = [make_request(i, 2, max_tokens=60) for i in (1, 2)]
    scored, late = make_request(3, 12, prompt_logprobs=2), make_request(4, 3)
    engine.add(*decoders)
    engine.step()
    engine.add(scored, late)
    for num_done in range(11):
        assert widths(engine) == {1: (1, 0), 2: (1, 0), 3: (1, 1)}, num_done
    assert widths(engine) == {1: (1, 0), 2: (1, 0), 3: (1, 0)}
    engine.run()
    assert engine.is_solo_answer(scored)
    assert engine.is_solo_answer(late)


def test_two_prompts_are_scored_one_after_the_other(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_seqs=3)
    engine.add(make_request(1, 6, prompt_logprobs=0), make_request(2, 6, prompt_logprobs=0))
    assert widths(engine) == {1: (3, 3)}
    assert widths(engine) == {1: (3, 2)}
    assert widths(engine) == {1: (1, 0), 2: (2, 2)}


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_preempted_request_owes_only_what_it_has_not_reported(
    make_engine: MakeEngine, make_request: MakeRequest, max_steps_in_flight: int
) -> None:
    """It comes back through the positions it has reported in one go, without logits."""
    engine = make_engine(
        max_num_seqs=3, num_blocks=10, max_model_len=40, max_steps_in_flight=max_steps_in_flight,
        enable_prefix_caching=False,
    )  # fmt: skip
    hungry, scored = make_request(1, 10, max_tokens=20), make_request(2, 24, prompt_logprobs=1)
    engine.add(hungry)
    engine.step()
    engine.add(scored)
    rows, num_reported = [], 0
    for _ in range(100):
        rows += [row for row in engine.launch().rows if row.request_id == 2]
        while len(engine.plans) >= max_steps_in_flight:
            engine.land()
        num_reported = num_reported or (scored.num_prompt_logits if scored.num_preemptions else 0)
        if scored.is_finished:
            break
    assert 0 < num_reported < 23
    back = next(row for index, row in enumerate(rows) if index and row.num_computed_tokens == 0)
    assert back.prompt_logits(24).start == num_reported
    assert engine.answer(scored).prompt_logprobs == engine.model.solo_prompt_logprobs(scored.prompt_ids, 1)
    assert engine.is_solo_answer(scored)


def test_prompt_logprobs_use_no_cached_prefix_but_their_blocks_are_cached(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_num_seqs=20)
    prompt = [1, 2, 3, 4] * 4
    for request_id, fields, num_cached in [(1, {}, 0), (2, {"prompt_logprobs": 1}, 0), (3, {}, 12)]:
        request = make_request(request_id, prompt, **fields)
        engine.add(request)
        engine.run()
        assert engine.answer(request).num_cached_tokens == num_cached, request_id
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (32, 12)  # of the first and the third


def test_a_row_that_fails_reports_nothing_of_its_chunk(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine(max_num_seqs=4)
    engine.failures[1] = 6
    failing, other = make_request(1, 12, prompt_logprobs=1), make_request(2, 5, prompt_logprobs=1)
    engine.add(failing, other)
    engine.run()
    assert engine.reason(failing) is EndReason.ENGINE_ERROR
    assert len(engine.answer(failing).prompt_logprobs) == 4
    assert engine.is_solo_answer(other)


def test_a_prompt_of_one_token_owes_nothing(make_engine: MakeEngine, make_request: MakeRequest) -> None:
    engine = make_engine()
    request = make_request(1, 1, prompt_logprobs=5)
    engine.add(request)
    engine.run()
    assert engine.answer(request).prompt_logprobs == []
    assert engine.is_solo_answer(request)
