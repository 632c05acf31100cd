"""Each limit is kept or not, at its edge; a request that had no chance to break it kept it."""

import pytest

from loadgen.errors import OptionError
from loadgen.measure.goodput import check_slo, judged, keeps
from loadgen.measure.samples import samples_of
from loadgen.record import Status
from tests.support.loadgen.runs import Answered, run_of


def _keeps(played: Answered, metric: str, limit_ms: float) -> bool:
    return bool(keeps(samples_of(run_of([played])), metric, limit_ms)[0])


_ANSWER = Answered(1.0, ((1.5, 1), (1.6, 1), (2.0, 4)), sent_s=1.25)  # TTFT 500, TPOT 100, ITL 100 and 100, E2E 1000


@pytest.mark.parametrize(("metric", "value_ms"), [("ttft", 500.0), ("tpot", 100.0), ("itl", 100.0), ("e2el", 1000.0)])
def test_a_limit_is_kept_up_to_its_value(metric: str, value_ms: float) -> None:
    assert _keeps(_ANSWER, metric, value_ms + 1e-6)
    assert not _keeps(_ANSWER, metric, value_ms - 1e-3)


@pytest.mark.parametrize("metric", ["tpot", "itl"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_one_message_keeps_every_limit_of_later_ones(metric: str, tokens: int) -> None:
    assert _keeps(Answered(0.0, ((5.0, tokens),)), metric, 0.001)


def test_gaps_that_were_lost_keep_no_limit() -> None:
    assert not _keeps(Answered(0.0, ((0.1, 1), (0.2, 1)), lost_chunks=1), "itl", 1e9)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "itl", "e2el"])
@pytest.mark.parametrize("status", [status for status in Status if status != Status.OK])
def test_whoever_was_not_answered_kept_nothing(metric: str, status: Status) -> None:
    assert not _keeps(Answered(0.0, ((0.1, 1), (0.2, 1)), status=status), metric, 1e9)


def test_two_messages_have_an_interval_between_them() -> None:
    assert not _keeps(Answered(0.0, ((0.1, 1), (0.2, 1))), "itl", 99.0)
    assert not _keeps(Answered(0.0, ((0.1, 1), (0.2, 1))), "tpot", 99.0)


def test_limits_are_checked() -> None:
    check_slo({"ttft": 0.001, "e2el": 1.0})
    with pytest.raises(OptionError, match="--goodput ttft:0: must be above 0 ms"):
        check_slo({"ttft": 0.0})
    with pytest.raises(OptionError, match="--goodput speed: is not one of ttft"):
        check_slo({"speed": 1.0})


def test_what_an_interruption_cut_off_is_judged_only_if_it_was_late() -> None:
    requests = [
        Answered(0.0, ((0.5, 1),)),
        Answered(1.0, status=Status.IN_FLIGHT),
        Answered(9.9, status=Status.IN_FLIGHT),
        Answered(9.9, status=Status.CANCELLED),
    ]
    run = run_of(requests, ended_s=10.0)
    slo = {"ttft": 500.0}
    assert judged(run, samples_of(run), slo).tolist() == [True, True, True, False]
    cut = run_of(requests, ended_s=10.0, interrupted=True)
    assert judged(cut, samples_of(cut), slo).tolist() == [True, True, False, False]
