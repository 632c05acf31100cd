from collections.abc import Callable

from engine.core.plan import PlanBuilder
from engine.core.request import BlockId, Request

MakeRequest = Callable[..., Request]


def progress(request: Request) -> tuple[int, int, int]:
    return request.num_computed_tokens, request.num_pending_tokens, request.num_rows_in_flight


def test_one_token_rows_are_packed_first_with_their_requests_in_the_same_order(make_request: MakeRequest) -> None:
    batch = PlanBuilder(10, 4)
    wide, narrow = make_request(1, 6), make_request(2, 1)
    batch.add_row(wide, 6, True, ())
    batch.add_row(narrow, 1, True, ())
    plan, requests = batch.build(1, [])
    assert [row.request_id for row in plan.rows] == [2, 1]
    assert requests == [narrow, wide]
    assert (plan.num_tokens, batch.budget) == (7, 3)


def test_a_decode_is_a_row_of_one_token_that_samples(make_request: MakeRequest) -> None:
    plans = []
    for add in (PlanBuilder.add_decode, lambda batch, request, blocks: batch.add_row(request, 1, True, blocks)):
        batch, request = PlanBuilder(10, 4), make_request(1, 6, num_computed_tokens=5)
        add(batch, request, (BlockId(7),))
        assert progress(request) == (6, 1, 1)
        plans.append((batch.budget, batch.build(1, [])[0]))
        batch.remove(request)
        assert (progress(request), batch.budget) == ((5, 0, 0), 10)
    assert plans[0] == plans[1]


def test_removing_a_row_undoes_all_it_meant(make_request: MakeRequest) -> None:
    batch = PlanBuilder(10, 4)
    wide, narrow, untouched = make_request(1, 6), make_request(2, 1), make_request(3, 1)
    batch.add_row(wide, 6, False, ())
    batch.add_row(narrow, 1, True, ())
    assert (progress(wide), progress(narrow)) == ((6, 0, 1), (1, 1, 1))
    for request in (wide, narrow, untouched):
        batch.remove(request)
        assert progress(request) == (0, 0, 0)
    plan, requests = batch.build(1, [])
    assert (plan.rows, requests) == ((), [])
    assert (batch.num_tokens, batch.budget) == (0, 10)


def test_plan_does_not_change_when_the_scheduler_goes_on(make_request: MakeRequest) -> None:
    batch, removed = PlanBuilder(10, 4), [make_request(7, 1).request_id]
    request = make_request(1, [1, 2], output_ids=[3])
    batch.add_new_request(request, (), None)
    plan, _ = batch.build(4, removed)
    removed.clear()
    request.output_ids.append(5)
    assert (plan.step, plan.removed_request_ids) == (4, (7,))
    assert (plan.new_requests[0].token_ids, plan.new_requests[0].num_prompt_tokens) == ((1, 2, 3), 2)
