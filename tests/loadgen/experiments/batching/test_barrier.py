"""Barriers: in front of everything, sharing nothing, and noticed when they open too early."""

import numpy as np

from loadgen.experiments.batching.barrier import behind_barriers, only_barriers, with_barriers
from loadgen.experiments.batching.cases import QUICK, synthetic_cases
from loadgen.step_log import Step, Usage
from tests.support.loadgen.batching import engine_steps
from tests.support.loadgen.runs import workload_of

BUDGET = 64


def gate_steps(*numbers: int, waiting: int = 0) -> list[Step]:
    """Two full steps per barrier."""
    steps = []
    for number in numbers:
        done = {number: Usage(2 * BUDGET, 0, 1)}
        steps += [
            Step(0.0, 1.0, {number: BUDGET}, {}, (), waiting, 1),
            Step(0.0, 1.0, {number: BUDGET}, done, (), waiting, 0),
        ]
    return steps


def run_steps(first: int = 3) -> list[Step]:
    """Five requests on two slots, all queued from the start."""
    return engine_steps([Usage(8, 0, 3)] * 5, 2, static=False, step_ms=lambda rows: 1.0, first=first)


def test_the_run_begins_behind_the_last_barrier() -> None:
    assert behind_barriers([*gate_steps(1, 2), *run_steps()], 2, 5) == run_steps()
    assert behind_barriers(run_steps(), 0, 5) == run_steps()


def test_a_request_that_comes_after_the_barriers_opened_is_noticed() -> None:
    late = [
        Step(s.started_ms, s.busy_ms, s.rows, s.finished, (), max(0, s.waiting - 1), s.running) for s in run_steps()
    ]
    assert behind_barriers([*gate_steps(1, 2), *late], 2, 5) is None


def test_a_request_admitted_beside_a_barrier_is_noticed() -> None:
    full, last = gate_steps(1)
    beside = Step(0.0, 1.0, {2: 1, 1: BUDGET - 1}, {**last.finished, 2: Usage(1, 0, 1)}, (), 5, 0)
    assert behind_barriers([full, beside, *gate_steps(3, waiting=4), *run_steps(4)], 2, 5) is None


def test_a_request_admitted_between_two_barriers_is_noticed() -> None:
    early = Step(0.0, 1.0, {2: 8}, {2: Usage(8, 0, 1)}, (), 5, 0)
    assert behind_barriers([*gate_steps(1), early, *gate_steps(3, waiting=4), *run_steps(4)], 2, 5) is None


def test_barriers_alone_are_no_run() -> None:
    assert behind_barriers(gate_steps(1, 2), 2, 0) is None


def test_barriers_stand_in_front_and_share_nothing() -> None:
    trace = synthetic_cases(QUICK)[1].trace
    gated = with_barriers(trace, 3, 4 * BUDGET)
    assert gated.input_tokens[:3].tolist() == [4 * BUDGET] * 3
    assert gated.output_tokens.tolist() == [1, 1, 1, *trace.output_tokens.tolist()]
    assert gated.arrival_s[:3].tolist() == [0.0] * 3
    assert np.diff(gated.arrival_s[2:]).min() > 0
    assert gated.digest == trace.digest
    assert len(set(gated.rows.tolist())) == len(gated)  # prompts without blocks are derived from them
    assert trace.blocks is not None
    assert gated.blocks is not None
    for index in range(len(trace)):
        assert gated.blocks.of(index + 3).tolist() == trace.blocks.of(index).tolist()
    gate_ids = np.concatenate([gated.blocks.of(index) for index in range(3)])
    assert len(gate_ids) == 3 * 4 * BUDGET / gated.blocks.block_tokens == len(set(gate_ids.tolist()))
    assert not set(gate_ids.tolist()) & set(trace.blocks.ids.tolist())


def test_a_trace_without_blocks_stays_without() -> None:
    trace = workload_of(np.zeros(2), np.array([5, 6]), np.array([7, 8]))
    assert with_barriers(trace, 1, 64).blocks is None
    assert len(only_barriers(4, 64)) == 4
