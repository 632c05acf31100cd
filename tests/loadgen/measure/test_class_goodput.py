"""What became of requests with latency targets, counted from when they were due."""

from dataclasses import asdict, replace

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.measure.class_goodput import ClassGoodput, late_tokens
from loadgen.measure.metrics import MeasureOptions, measure
from loadgen.measure.samples import samples_of
from loadgen.record import RunData, Status
from tests.support.loadgen.runs import Answered, run_of, with_requests

QUICK = ServiceClass(name="quick", ttft_s=0.5, inter_token_s=0.1, when_infeasible="refuse")
PACED = ServiceClass(name="paced", inter_token_s=0.1, pacing="paced")
BATCH = ServiceClass(name="batch")


def with_classes(run: RunData, classes: list[ServiceClass], **columns: object) -> RunData:
    run = replace(run, settings={**run.settings, "service_classes": [asdict(one) for one in classes]})
    return with_requests(run, **{"service_class": 0, **columns})


def judged(run: RunData) -> ClassGoodput:
    (one,) = measure(run, MeasureOptions()).whole.classes
    return one


def test_every_request_is_counted_once_by_what_became_of_it() -> None:
    answers = [
        Answered(0.0, ((0.5, 1), (0.6, 1))),  # met, at the edge of both targets
        Answered(1.0, ((1.51, 1),)),  # first token late
        Answered(2.0, ((2.1, 1), (2.21, 1))),  # a gap too long
        Answered(3.0, sent_s=3.0, ended_s=3.01, status=Status.REFUSED, error="no"),
        Answered(4.0, sent_s=4.0, ended_s=4.01, status=Status.ERROR, error="no"),
        Answered(5.0, status=Status.DROPPED),
    ]
    one = judged(with_classes(run_of(answers, ended_s=10.0), [QUICK]))
    assert (one.offered, one.met, one.late, one.refused, one.failed) == (6, 1, 2, 1, 2)
    assert (one.came_back, one.met_at_retry) == (0, 0)
    assert one.good_requests_per_s == pytest.approx(0.1)
    assert one.good_tokens_per_s == pytest.approx((16 + 2) / 10)
    assert one.ttft.n == 3
    assert one.itl.n == 2


def test_rates_by_class_never_exceed_what_was_delivered() -> None:
    """One request a second is due, one is answered every two: half of them after the last arrival."""
    run = run_of([Answered(1.0 * i, ((2.0 * i + 1.0, 1),)) for i in range(20)])
    metrics = measure(with_classes(run, [BATCH]), MeasureOptions())
    assert metrics.steady.span.end_s == 19.0
    (one,) = metrics.steady.classes
    assert (one.offered, one.met) == (20, 20)
    assert one.good_requests_per_s == pytest.approx(10 / 19) == metrics.steady.throughput.requests_per_s
    assert one.good_tokens_per_s == pytest.approx(10 * (16 + 1) / 19)


def test_time_in_the_client_counts_against_the_first_token() -> None:
    one = judged(with_classes(run_of([Answered(0.0, ((0.6, 1),), sent_s=0.3)]), [QUICK]))
    assert (one.met, one.late) == (0, 1)


def test_a_request_that_came_back_is_one_request_and_late_from_when_it_was_due() -> None:
    answers = [Answered(0.0, ((9.4, 1),)), Answered(0.0, ((9.6, 1),)), Answered(0.0, status=Status.REFUSED, error="no")]
    run = run_of(answers, ended_s=10.0)
    retried = {"retry_due_ns": 9_000_000_000, "resent_ns": 9_001_000_000, "num_retries": 1, "retry_lag_ns": 1_000_000}
    one = judged(with_classes(run, [QUICK], **retried))
    assert (one.offered, one.came_back) == (3, 3)
    assert (one.met, one.met_at_retry, one.late, one.refused) == (0, 1, 1, 1)
    assert one.retries_met_share == pytest.approx(1 / 3)
    samples = samples_of(with_classes(run, [QUICK], **retried))
    assert samples.ttft.tolist()[:2] == [9400.0, 9600.0]  # from when they were due
    assert samples.service_ttft[0] == pytest.approx(399.0)
    assert samples.dispatch_lag.tolist() == [1.0, 1.0, 1.0]


def test_a_request_that_came_back_soon_enough_met_its_targets() -> None:
    run = run_of([Answered(0.0, ((0.4, 1),))], ended_s=10.0)
    one = judged(with_classes(run, [QUICK], retry_due_ns=100_000_000, resent_ns=101_000_000, num_retries=1))
    assert (one.came_back, one.met, one.met_at_retry, one.retries_met) == (1, 1, 0, 1)
    assert one.retries_met_share == 1.0


def test_classes_are_judged_by_their_own_targets() -> None:
    answers = [Answered(0.0, ((0.9, 1),)), Answered(0.0, ((0.9, 1),))]
    run = with_classes(run_of(answers), [QUICK, BATCH], service_class=np.array([0, 1]))
    quick, batch = measure(run, MeasureOptions()).whole.classes
    assert (quick.name, quick.met, quick.late) == ("quick", 0, 1)
    assert (batch.name, batch.met, batch.late) == ("batch", 1, 0)


def test_one_percent_of_the_tokens_may_be_late() -> None:
    steady = tuple((0.1 + 0.05 * number, 1) for number in range(100))
    one_late = (*steady[:-1], (steady[-1][0] + 1.0, 1))
    two_late = (*one_late, (one_late[-1][0] + 1.0, 1))
    run = run_of([Answered(0.0, steady), Answered(0.0, one_late), Answered(0.0, two_late)])
    assert judged(with_classes(run, [QUICK])).met == 2


@pytest.mark.parametrize(
    ("messages", "late"),
    [
        (((1.0, 1), (1.1, 1), (1.2, 1)), 0),
        (((1.0, 1), (1.01, 1), (1.2, 1)), 0),  # early tokens make up for a long gap
        (((1.0, 1), (1.15, 1), (1.2, 1)), 1),
        (((1.0, 3), (1.31, 1)), 1),  # the fourth token is due at 1.3
        (((1.0, 1), (1.25, 3)), 2),  # due at 1.1, 1.2 and 1.3
    ],
)
def test_paced_tokens_are_late_after_their_schedule(messages: tuple[tuple[float, int], ...], late: int) -> None:
    run = with_classes(run_of([Answered(0.0, ((0.5, 1),)), Answered(0.0, messages)]), [PACED])
    assert late_tokens(run, samples_of(run), [PACED]).tolist() == [0, late]


def test_without_classes_there_is_no_goodput_by_class() -> None:
    assert measure(run_of([Answered(0.0, ((0.5, 1),))])).whole.classes == ()
