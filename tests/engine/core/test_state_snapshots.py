"""Where copies of states are made, and which prefixes are reused with them. Blocks have 4 tokens."""

import pytest

from engine.core.state_snapshots import StateSnapshots
from engine.errors import IntegrityError

SHARED = [1, 2] * 100


@pytest.fixture
def engine(make_engine):
    return make_engine(
        num_state_snapshots=16, max_num_seqs=8, num_blocks=512, max_model_len=512, max_num_batched_tokens=256
    )


@pytest.fixture
def serve(engine, make_request):
    """serve(prompt, **fields) -> the request, which has run alone, and the tokens of its steps."""
    ids = iter(range(1, 100))

    def run(prompt, **fields):
        request = make_request(next(ids), prompt, **fields)
        engine.add(request)
        steps = [sum(step.values()) for step in engine.run()]
        assert engine.answer(request).completion is not None
        return request, steps

    return run


def test_where_prompts_part_the_second_one_makes_a_copy_and_the_third_one_uses_it(serve):
    (first, first_steps), (second, second_steps), (third, _) = (serve([*SHARED, *[n] * 40]) for n in (3, 4, 5))
    assert first_steps[:2] == [232, 8]  # the first copy is near the end of the prompt
    assert second_steps[:2] == [200, 40]
    assert [one.num_cached_tokens for one in (first, second, third)] == [0, 0, 200]


def test_the_next_turn_goes_on_behind_the_answer_or_behind_the_prompt(serve):
    prompt = [*SHARED, 3]
    request, _ = serve(prompt, max_tokens=70)
    behind_answer, _ = serve([*prompt, *request.output_ids, 4, 5, 6])
    assert behind_answer.num_cached_tokens == 256  # every 64 tokens
    without_answer, _ = serve([*prompt, 4, 5, 6, *request.output_ids])
    assert without_answer.num_cached_tokens == 192  # 8 tokens of a prompt may belong to the answer


def test_a_template_may_end_a_prompt_with_tokens_that_the_next_turn_lacks(serve):
    serve([*SHARED, 7, 7, 7, 7])
    next_turn, _ = serve([*SHARED, 5, 5, 5, 5])
    assert next_turn.num_cached_tokens == 196


def test_a_short_prompt_is_computed_in_one_step(serve):
    _, steps = serve(SHARED[:135])
    assert steps[0] == 135


def test_an_answer_has_one_copy_at_a_time(engine, serve):
    serve(SHARED[:20], max_tokens=100)
    states = engine.scheduler._cache.states
    assert len(states._slot_of) == 1
    serve(SHARED[:20], max_tokens=100, cache_salt=b"other")
    assert len(states._slot_of) == 2


@pytest.mark.parametrize(("num_running", "num_copies"), [(1, 2), (2, 2)])
def test_with_few_slots_only_prompts_have_copies(make_engine, make_request, num_running, num_copies):
    """Three slots hold the prompt and the answer of one request, but not of two."""
    engine = make_engine(num_state_snapshots=3, num_blocks=512, max_model_len=512, max_num_batched_tokens=512)
    for index in range(num_running):
        engine.add(make_request(index, [*SHARED, index], max_tokens=70, cache_salt=bytes([index])))
    engine.run()
    assert len(engine.scheduler._cache.states._slot_of) == num_copies


def test_the_least_recently_used_copy_is_replaced(make_engine, make_request):
    engine = make_engine(num_state_snapshots=2, num_blocks=512, max_model_len=256)
    cached = []
    for index, salt in enumerate((b"a", b"b", b"a", b"c", b"a", b"b")):
        request = make_request(index, SHARED, cache_salt=salt)
        engine.add(request)
        engine.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 192, 0, 192, 0]


def test_without_prefix_caching_nothing_is_copied(make_engine, make_request):
    engine = make_engine(num_state_snapshots=4, enable_prefix_caching=False, max_model_len=256)
    for index in range(2):
        engine.add(make_request(index, SHARED))
        while engine.scheduler.has_work():
            plan = engine.launch()
            assert not plan.saved_states
            assert all(request.snapshot is None for request in plan.new_requests)
            engine.land()


def test_what_a_failed_step_copies_is_not_used(make_engine, make_request):
    engine = make_engine(num_state_snapshots=16, max_num_batched_tokens=256, max_model_len=256, max_steps_in_flight=2)
    first = make_request(1, SHARED)
    engine.failures[1] = 191  # the last token before the copy
    engine.add(first)
    assert not engine.launch().saved_states
    assert engine.launch().saved_states
    engine.land()
    engine.land()
    assert not engine.scheduler._cache.states._slot_of
    assert len(engine.scheduler._cache.states._free) == 16


def test_no_copy_behind_tokens_that_are_not_known_yet(make_engine, make_request):
    """With three steps in flight two samples are pending when the last of a block's tokens is scheduled."""
    engine = make_engine(num_state_snapshots=16, max_steps_in_flight=3)
    engine.add(make_request(1, 3, max_tokens=4))
    plans = [engine.launch() for _ in range(3)]
    assert [row.num_computed_tokens for plan in plans for row in plan.rows] == [0, 3, 4]
    assert not any(plan.saved_states for plan in plans)


@pytest.mark.parametrize(("num_tokens", "points"), [(161, (144,)), (162, (160,)), (176, (160,)), (400, (160, 384))])
def test_the_step_behind_a_copy_has_two_tokens_and_more(make_request, num_tokens, points):
    """The row of a single one is a decode, which looks for no copy to make."""
    assert StateSnapshots(4).points(make_request(1, num_tokens), 0, 160, 16) == points


def test_an_answer_does_not_replace_the_copy_that_another_request_made_since(make_request):
    """Both have the same tokens, and the first copy of them was given up in between."""
    states, answer = StateSnapshots(4), make_request(1, 32)
    first = states.begin(answer, 64, b"same", 1)
    states.end(first.snapshot, is_kept=True)
    for name in (b"b", b"c", b"d", b"e"):  # as many as there are slots
        states.end(states.begin(make_request(2, 300), 128, name, 1).snapshot, is_kept=True)
    again = states.begin(make_request(3, 300), 128, b"same", 1)
    assert again.snapshot != first.snapshot
    states.end(again.snapshot, is_kept=True)
    states.begin(answer, 128, b"next", 1)
    assert b"same" in states._slot_of
    states.check_integrity()


def test_a_lost_slot_is_reported():
    states = StateSnapshots(3)
    states.check_integrity()
    states._free.pop()
    with pytest.raises(IntegrityError, match=r"slots of states \[1, 2\], expected each of 3 once"):
        states.check_integrity()
