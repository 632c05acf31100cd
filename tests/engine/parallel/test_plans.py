"""Plans survive the way to the other ranks."""

from dataclasses import fields

from engine.constraints.constraint import Constraint
from engine.core.outputs import NewRequest, ScheduledRow, SchedulerOutput
from engine.core.request import BlockId, RequestId, SamplingParams
from engine.core.state_snapshots import SavedState
from engine.parallel.plans import COLLECT, pack_plan, unpack_plan

PARAMS = SamplingParams(
    seed=2**64 - 1,
    max_tokens=7,
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    repetition_penalty=1.1,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    logit_bias=((3, -1.5), (9, float("-inf"))),
    min_tokens=2,
    stop_token_ids=(5, 6),
    ignore_end_token=True,
    top_logprobs=4,
    prompt_logprobs=2,
)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def test_every_field_of_a_plan_survives() -> None:
    default = SamplingParams(seed=0, max_tokens=1)
    assert all(getattr(PARAMS, f.name) != getattr(default, f.name) for f in fields(PARAMS)), "a field is not tested"
    plan = SchedulerOutput(
        step=12,
        removed_request_ids=(RequestId(-2), RequestId(2**40)),
        new_requests=(
            NewRequest(RequestId(3), tuple(range(1000)), 990, PARAMS, blocks(4, 5), snapshot=9),
            NewRequest(RequestId(4), (1,), 1, default, blocks(6)),
        ),
        rows=(
            ScheduledRow(RequestId(1), 1, 17, blocks(7), True),
            ScheduledRow(RequestId(4), 1, 0, (), True),
            ScheduledRow(RequestId(3), 900, 0, (), False, 899),
        ),
        num_tokens=902,
        saved_states=(SavedState(RequestId(1), 4), SavedState(RequestId(4), 0)),
        drafts=((5, 6), (2**31 - 1,)),
    )
    unpacked = unpack_plan(pack_plan(plan))
    assert unpacked == plan
    assert all(type(row) is ScheduledRow for row in unpacked.rows)
    assert all(type(state) is SavedState for state in unpacked.saved_states)


def test_constraints_stay_with_the_rank_that_samples() -> None:
    request = NewRequest(RequestId(3), (1, 2), 2, PARAMS, blocks(4))
    plan = SchedulerOutput(1, (), (request._replace(constraint=Constraint(100, allowed_ids=[5])),), (), 0)
    assert unpack_plan(pack_plan(plan)) == SchedulerOutput(1, (), (request,), (), 0)


def test_an_empty_plan_survives_and_is_no_other_message() -> None:
    plan = SchedulerOutput(1, (), (), (), 0)
    assert unpack_plan(pack_plan(plan)) == plan
    assert pack_plan(plan) != COLLECT
