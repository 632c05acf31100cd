from types import SimpleNamespace

from engine.constraints.constraint import Constraint
from engine.runner.row_masks import MaskedRow, RowMasks
from engine.runner.stream import InlineStream

VOCAB_SIZE = 40


def plan(new=(), removed=()):
    return SimpleNamespace(new_requests=new, removed_request_ids=removed)


def test_static_mask_is_computed_once_while_other_requests_leave():
    masks = RowMasks(max_num_seqs=2, vocab_size=VOCAB_SIZE, stream=InlineStream())
    requests = [
        SimpleNamespace(
            request_id=index,
            constraint=Constraint(VOCAB_SIZE, allowed_ids=[index]),
            num_prompt_tokens=3,
            token_ids=[1, 2, 3],
        )
        for index in range(2)
    ]
    masks.apply(plan(new=requests))
    rows = [MaskedRow(index, index, 0, request.constraint) for index, request in enumerate(requests)]
    masks.prepare(rows, 2)
    masks.apply(plan(removed=[1]))
    masks.prepare(rows[:1], 1)
    assert masks.num_filled == 2
