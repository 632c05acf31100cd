"""Fleets whose schedules can be computed by hand: exact times, no noise."""

import pytest

from chairlift.service.service_classes import ServiceClass
from engine.core.latency.step_time import Coefficients, StepTimePrior
from loadgen.simulation.fleet import FleetOptions
from loadgen.simulation.policies import parse_policy
from loadgen.simulation.workload import NO_CLASS, SimulatedRequest

EXACT = StepTimePrior(Coefficients(1.0, 0.125, 0.0, 0.0, 0.0))
"""A step takes 1 s and 1/8 s per token: sums of these are exact."""


@pytest.fixture
def request_of():
    def make(index, arrival_s, input_tokens, output_tokens, service_class=NO_CLASS, blocks=()):
        return SimulatedRequest(
            index, arrival_s, input_tokens, output_tokens, service_class, tuple(blocks), 16 if blocks else 0
        )

    return make


@pytest.fixture
def fleet_of():
    def make(policy="fcfs@8", classes=(), **changes):
        values = {
            "num_engines": 1, "cost": EXACT, "policy": parse_policy(policy, classes), "kv_cache_tokens": 16 * 1024,
            "max_model_len": 1024, "has_prefix_cache": False,
        }  # fmt: skip
        return FleetOptions(**{**values, **changes})

    return make


@pytest.fixture
def interactive():
    return ServiceClass(
        name="interactive", ttft_s=4.0, inter_token_s=2.0, pacing="paced", when_infeasible="refuse", weight=2.0
    )
