"""The gaps of streams beside long prompts, on a device whose steps cannot be predicted well."""

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from engine.core.latency.step_time import Coefficients, StepTimePrior
from loadgen.simulation.fleet import simulate

SMALL_CPU = StepTimePrior(Coefficients(3.7e-3, 138e-6, 440e-6, 157e-9, 123e-9))
"""Fitted to a real pair on two cores: 64 tokens late in a prompt of 2,048 take longer than decodes of 16 streams."""

SLOW_MEMORY = StepTimePrior(Coefficients(1.6e-3, 131e-6, 250e-6, 1600e-9, 108e-9))
"""The same on a day when reading the context was ten times slower: decodes alone take three quarters of the target once
the streams have 550 tokens."""

TARGET_S = 0.0296
"""Twice the gap of 16 streams alone, as measured there."""


@pytest.mark.parametrize(
    ("device", "noise"),
    [(SMALL_CPU, 0.0), (SMALL_CPU, 0.03), (SMALL_CPU, 0.15), (SLOW_MEMORY, 0.0), (SLOW_MEMORY, 0.03)],
)
def test_gaps_keep_their_target_beside_long_prompts(device, noise, request_of, fleet_of):
    stream, other = ServiceClass(name="stream", inter_token_s=TARGET_S), ServiceClass(name="prompt")
    requests = [request_of(index + 1, 0.001 * index, 64, 3900, stream) for index in range(16)]
    requests += [request_of(100 + index, 2 + 0.1 * index, 2048, 1, other) for index in range(130)]
    limits = {"cost": device, "kv_cache_tokens": 32 * 4096, "max_num_seqs": 32, "max_model_len": 4096}
    gaps = {}
    for policy in ("slo@2048", "fcfs@2048"):
        fleet = fleet_of(policy, [stream, other], noise=noise, seed=1, **limits)
        run = simulate([*requests], fleet, 15.0)
        gaps[policy] = np.percentile(run.gaps_s["stream"], 99) / TARGET_S
        assert sum(request.num_tokens for request in requests[16:]) > 0  # prompts make progress
        requests = [
            request_of(one.index, one.arrival_s, one.input_tokens, one.output_tokens, one.service_class)
            for one in requests
        ]
    assert gaps["slo@2048"] <= 1.1
    assert gaps["fcfs@2048"] >= 3
