from types import SimpleNamespace

from engine.constraints.constraint import Constraint
from engine.runner.row_masks import MaskedRow, RowMasks
from engine.runner.stream import InlineStream
from tests.support.engine.stream import LateStream

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


def test_steps_allocate_no_host_memory_and_the_masks_of_steps_in_flight_do_not_share_any():
    """Allocating pinned memory stalls a GPU, and the copy of one step may still run when the next is prepared."""
    stream = LateStream(0, eagerness=0.0)
    masks = RowMasks(max_num_seqs=1, vocab_size=VOCAB_SIZE, stream=stream, max_steps_in_flight=2)
    stream.host_buffer = None  # any call would fail
    uploads = []
    for step, token_id in enumerate((3, 5)):
        constraint = Constraint(VOCAB_SIZE, allowed_ids=[token_id])
        uploads.append((token_id, masks.prepare([MaskedRow(0, 0, step, constraint)], 1)))
    for token_id, upload in uploads:
        words = upload().words[0].tolist()
        assert words == [1 << token_id, 0]
