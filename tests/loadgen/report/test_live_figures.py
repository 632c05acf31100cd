"""A look at a half-done run, against sums made one request at a time."""

import math

import numpy as np
import pytest

from loadgen.record import ABSENT, LiveView, RunData, Status, new_requests
from loadgen.report.live_figures import look
from tests.support.loadgen.runs import synthetic_run


def at(run: RunData, now_s: float) -> LiveView:
    """The shared array as it was at a moment of the run."""
    now_ns = round(now_s * 1e9)
    requests = run.requests.copy()
    sent = (requests["sent_ns"] >= 0) & (requests["sent_ns"] <= now_ns)
    over = (sent & (requests["ended_ns"] >= 0) & (requests["ended_ns"] <= now_ns)) | (
        (requests["status"] == Status.DROPPED) & (requests["scheduled_ns"] <= now_ns)
    )
    requests["status"] = np.where(over, requests["status"], np.where(sent, Status.IN_FLIGHT, Status.UNSENT))
    arrived = run.chunks[run.chunks["arrived_ns"] <= now_ns]
    requests["num_tokens"] = np.bincount(arrived["request"], weights=arrived["tokens"], minlength=len(requests))
    for index in range(len(requests)):
        own = arrived["arrived_ns"][arrived["request"] == index]
        requests["first_ns"][index], requests["last_ns"][index] = (own[0], own[-1]) if len(own) else (ABSENT, ABSENT)
    requests["sent_ns"] = np.where(sent, requests["sent_ns"], ABSENT)
    requests["ended_ns"] = np.where(over, requests["ended_ns"], ABSENT)
    return LiveView(now_s, requests, float(run.workload.arrival_s[-1]))


@pytest.mark.parametrize("now_s", [0.3, 4.0, 11.0, 20.0])
def test_a_look_equals_sums_over_requests(now_s: float) -> None:
    run = synthetic_run(150, rate=10.0, outcomes={Status.ERROR: 6, Status.DROPPED: 5, Status.TIMEOUT: 4}, lag_ms=3.0)
    view = at(run, now_s)
    found = look(view)
    rows = [{name: int(row[name]) for name in row.dtype.names} for row in view.requests]
    over = [row for row in rows if row["status"] not in (Status.UNSENT, Status.IN_FLIGHT)]
    assert found.total == 150
    assert found.offered == sum(row["scheduled_ns"] <= now_s * 1e9 for row in rows)
    assert found.done == len(over)
    assert found.failed == sum(row["status"] in (Status.ERROR, Status.TIMEOUT, Status.DROPPED) for row in rows)
    assert found.in_flight == sum(row["status"] == Status.IN_FLIGHT for row in rows)
    assert found.waiting == found.offered - found.done - found.in_flight
    assert found.tokens == sum(row["num_tokens"] for row in rows)
    since_ns = (now_s - 10.0) * 1e9
    ttft = [(row["first_ns"] - row["scheduled_ns"]) / 1e6 for row in rows if row["first_ns"] >= max(0, since_ns)]
    assert found.ttft.p50 == pytest.approx(np.quantile(ttft, 0.5) if ttft else math.nan, nan_ok=True)
    tpot = [
        (row["last_ns"] - row["first_ns"]) / (row["num_tokens"] - 1) / 1e6
        for row in rows
        if row["status"] == Status.OK and row["num_tokens"] >= 2 and row["last_ns"] >= since_ns
    ]
    assert found.tpot.p99 == pytest.approx(np.quantile(tpot, 0.99) if tpot else math.nan, nan_ok=True)
    late = [(row["sent_ns"] - row["scheduled_ns"]) / 1e6 for row in rows if row["sent_ns"] >= max(0, since_ns)]
    assert found.lag_ms == pytest.approx(np.quantile(late, 0.99))


def test_before_the_start_nothing_is_known() -> None:
    found = look(LiveView(-1.5, new_requests(10), 60.0))
    assert (found.offered, found.done, found.in_flight, found.waiting, found.tokens) == (0, 0, 0, 0, 0)
    assert math.isnan(found.ttft.p50)
    assert math.isnan(found.lag_ms)
    assert look(LiveView(0.0, new_requests(0), 0.0)).total == 0
