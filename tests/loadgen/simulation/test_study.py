"""Policies at several loads, beside the bound that none of them can exceed."""

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.errors import OptionError
from loadgen.simulation.study import Workload, study
from loadgen.trace.schema import Accounting, Trace

SOON = ServiceClass(name="soon", ttft_s=30.0)


def burst_then_few() -> Trace:
    """Forty prompts of 80 tokens at once, of which few can be in time, and four of 8 tokens long after them."""
    arrival_s = np.array([0.0] * 40 + [1000.0, 1100.0, 1200.0, 1300.0])
    return Trace(
        name="burst",
        format="made up",
        digest="",
        arrival_s=arrival_s,
        input_tokens=np.array([80] * 40 + [8] * 4),
        output_tokens=np.ones(44, dtype=np.int64),
        rows=np.arange(44),
        accounting=Accounting(44),
    )


@pytest.mark.parametrize(("warmup_s", "good", "most"), [(0.0, 5 / 44, 0.2), (900.0, 1.0, 1.0)])
def test_the_bound_is_of_the_requests_that_are_counted(fleet_of, warmup_s, good, most):
    workload = Workload(trace=burst_then_few(), classes={"soon": SOON}, mix={}, warmup_s=warmup_s)
    options = fleet_of()
    [at_one] = study(workload, options, [options.policy], [1.0])
    assert at_one.results[0].total.good_share == pytest.approx(good)
    assert good - 1e-9 <= at_one.bound <= most + 1e-9


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"duration_s": 400.0}, "--duration 400 at"), ({"warmup_s": 500.0}, "--warmup 500: at load 4")],
)
def test_a_load_that_the_trace_is_too_short_for_is_refused_before_anything_is_simulated(
    fleet_of, changes, complaint, monkeypatch
):
    """Loads that were simulated before it would be lost."""
    workload = Workload(trace=burst_then_few(), classes={}, mix={}, **changes)
    options = fleet_of()
    simulated = []
    monkeypatch.setattr("loadgen.simulation.study.simulate_policy", lambda *args, **_: simulated.append(args))
    with pytest.raises(OptionError, match=complaint):
        study(workload, options, [options.policy], [1.0, 4.0])
    assert simulated == []
