"""The twin beside a real pair."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.experiments.latency import twin
from loadgen.service_mix import ServiceMix
from tests.support.loadgen.runs import synthetic_run


def test_a_run_that_was_stopped_ends_the_experiment(monkeypatch):
    """Else its part would be compared with the twin's whole."""
    run = synthetic_run(4)
    monkeypatch.setattr(twin, "run_workload", lambda *_: replace(run, interrupted=True))
    mix = ServiceMix(classes={"all": ServiceClass(name="all")})
    with pytest.raises(KeyboardInterrupt):
        twin._play(SimpleNamespace(address="127.0.0.1:1"), run.workload, mix, 0)
