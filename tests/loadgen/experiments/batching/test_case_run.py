"""Client and engine joined: times from the barrier on, tokens per request, and durations of steps."""

import numpy as np
import pytest

from loadgen.errors import ResultError
from loadgen.experiments.batching.case_run import case_run_of, require_whole_answers
from loadgen.record import Status
from loadgen.step_log import Step, Usage
from tests.support.loadgen.runs import Answered, healthy, run_of, with_requests

GATE = Answered(0.0, ((2.0, 1),), input_tokens=64)
REQUESTS = (Answered(0.1, ((2.25, 1), (2.5, 2))), Answered(0.1, ((3.0, 1),)), Answered(0.1, ((2.5, 1), (4.0, 1))))
STEPS = [
    Step(1000.0, 200.0, {8: 16, 9: 16}, {}, (), 1, 2),
    Step(1250.0, 200.0, {8: 1, 9: 1}, {9: Usage(16, 8, 2)}, (), 1, 1),
    Step(1500.0, 300.0, {8: 1, 10: 16}, {8: Usage(16, 0, 3), 10: Usage(16, 0, 1)}, (), 0, 0),
]


def test_times_count_from_the_opening_of_the_barrier() -> None:
    case_run = case_run_of(run_of([GATE, *REQUESTS]), 1, STEPS, 2)
    assert case_run.seconds == pytest.approx(2.0)
    assert case_run.latencies.ttft == pytest.approx([250, 1000, 500])
    assert case_run.latencies.normalized == pytest.approx([500 / 3, 1000, 1000])
    assert case_run.latencies.tpot == pytest.approx([125, 1500])  # an answer of one token has none
    assert (case_run.output_tokens, case_run.tokens_per_s) == (6, pytest.approx(3.0))


def test_without_barriers_times_count_from_when_requests_were_due() -> None:
    requests = [Answered(1.0, ((1.5, 1),)), Answered(3.0, ((3.25, 1), (3.75, 1)))]
    steps = [
        Step(0.0, 10.0, {1: 4}, {1: Usage(4, 0, 1)}, (), 0, 0),
        Step(900.0, 20.0, {2: 4}, {}, (), 0, 1),
        Step(950.0, 30.0, {2: 1}, {2: Usage(4, 0, 2)}, (), 0, 0),
    ]
    case_run = case_run_of(run_of(requests), 0, steps, 2)
    assert case_run.seconds == pytest.approx(2.75)
    assert case_run.latencies.ttft == pytest.approx([500, 250])
    assert case_run.steps.ms == pytest.approx([10, 50, 30])  # no step lasts through a pause


def test_steps_and_slots_are_the_engines() -> None:
    case_run = case_run_of(run_of([GATE, *REQUESTS]), 1, STEPS, 2)
    assert case_run.steps.rows.tolist() == [2, 2, 2]
    assert case_run.steps.tokens.tolist() == [32, 2, 17]
    assert case_run.steps.ms == pytest.approx([250, 250, 300])
    assert case_run.slot_use.utilisation == 1.0
    assert case_run.cached_share == pytest.approx(8 / 48)
    assert case_run.num_preemptions == 0
    assert case_run.num_misplaced == 2  # the engine had answers of 3, 2 and 1 tokens, 3, 1 and 2 were planned
    assert case_run.padding_ratio == pytest.approx(3 * (16 + 3 - 1) / 51)


def test_cores_of_the_client_are_those_of_frontend_and_workers_per_second_of_the_run() -> None:
    workers = [healthy(0, 3.0, cpu_share=0.25), healthy(1, 3.0, cpu_share=0.5)]  # 4 seconds each
    case_run = case_run_of(run_of([GATE, *REQUESTS], workers=workers), 1, STEPS, 2, frontend_cpu_s=0.6)
    assert case_run.client_cores == pytest.approx((1.0 + 2.0 + 0.6) / 2.0)


def test_answers_that_the_engine_did_not_give_are_an_error() -> None:
    with pytest.raises(ResultError, match="log has 3 answers of 6 tokens, 2 of 5 were asked for"):
        case_run_of(run_of([GATE, REQUESTS[0], REQUESTS[2]]), 1, STEPS, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": np.array([Status.OK, Status.ERROR], dtype=np.int8)}, "1 of 2 requests got no whole answer"),
        ({"num_tokens": np.array([3, 2])}, "1 of 2 answers have another length"),
    ],
)
def test_a_run_without_all_answers_is_refused(change: dict[str, object], message: str) -> None:
    run = run_of(REQUESTS[:2])
    require_whole_answers(run)
    with pytest.raises(ResultError, match=message):
        require_whole_answers(with_requests(run, **change))


def test_an_interrupted_run_is_refused() -> None:
    with pytest.raises(ResultError, match="interrupted"):
        require_whole_answers(run_of(REQUESTS, interrupted=True))
