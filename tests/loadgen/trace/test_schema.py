from dataclasses import replace

import numpy as np
import pytest

from loadgen.trace.schema import Accounting, Blocks, Trace, workload_digest


@pytest.fixture
def trace():
    return Trace(
        name="t",
        format="jsonl",
        digest="d",
        arrival_s=np.array([0.0, 1.0, 1.5]),
        input_tokens=np.array([4, 9, 5]),
        output_tokens=np.array([1, 2, 3]),
        rows=np.array([0, 1, 2]),
        accounting=Accounting(4, {"bad": 1}),
        blocks=Blocks(np.array([1, 1, 2, 3, 4, 5]), np.array([0, 1, 4, 6]), 4),
        sessions=np.array([-1, 7, 7]),
    )


def test_taking_requests_keeps_their_columns_together_and_the_account(trace):
    part = trace.take(np.array([2, 0]), "why")
    assert part.rows.tolist() == [2, 0]
    assert part.input_tokens.tolist() == [5, 4]
    assert part.sessions.tolist() == [7, -1]
    assert [part.blocks.of(index).tolist() for index in range(2)] == [[4, 5], [1]]
    assert part.accounting.dropped == {"bad": 1, "why": 1}
    assert part.accounting.kept == len(part) == 2


def test_taking_none_leaves_empty_columns(trace):
    nothing = trace.take(np.array([], dtype=np.int64), "why")
    assert len(nothing) == len(nothing.blocks.ids) == 0
    assert nothing.span_s == 0.0
    assert nothing.accounting.kept == 0


def test_counts_of_the_same_reason_add_up_and_none_are_not_noted():
    accounting = Accounting(10).drop("a", 2).drop("a", 3).drop("b", 0).alter("c", 1).alter("c", 1).alter("d", 0)
    assert accounting == Accounting(10, {"a": 5}, {"c": 2})
    assert accounting.kept == 5


def test_the_workload_digest_sees_whatever_is_run_and_nothing_else(trace):
    digest = workload_digest(trace)
    blocks = trace.blocks
    for other in (
        replace(trace, arrival_s=np.add(trace.arrival_s, [0, 0, 1e-6])),
        replace(trace, input_tokens=np.add(trace.input_tokens, [0, 1, 0])),
        replace(trace, output_tokens=np.add(trace.output_tokens, [0, 0, 1])),
        replace(trace, blocks=replace(blocks, ids=np.add(blocks.ids, [0, 0, 0, 0, 0, 1]))),
        replace(trace, blocks=replace(blocks, block_tokens=5)),
        replace(trace, blocks=None),
    ):
        assert workload_digest(other) != digest
    same = replace(
        trace, name="u", format="azure", digest="e", rows=trace.rows + 5, accounting=Accounting(3), speed=2.0
    )
    assert workload_digest(same) == digest
