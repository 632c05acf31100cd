"""What an overload leaves behind, and what `headroom` buys: an H200's step times, lengths as in a trace of chats."""

import numpy as np
import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.simulation.fleet import simulate
from loadgen.simulation.results import is_good
from loadgen.simulation.step_cost import DEVICES

CAPACITY = 20.0
"""Requests per second at which first come first served begins to miss targets."""

BURST_S = (5.0, 25.0)
END_S = 45.0


def interactive(headroom=0.0):
    return ServiceClass(
        name="interactive", ttft_s=0.5, inter_token_s=0.03, pacing="paced", when_infeasible="refuse", headroom=headroom
    )


STANDARD = ServiceClass(name="standard", ttft_s=2.0, inter_token_s=0.06, pacing="paced", when_infeasible="refuse")
BATCH = ServiceClass(name="batch")


@pytest.fixture
def replay(request_of, fleet_of):
    """Returns the requests after a replay; `load_at` gives the load at a time, as a multiple of the capacity."""

    def run(policy, load_at, headroom=0.0, seed=1):
        classes = [interactive(headroom), STANDARD, BATCH]
        random = np.random.default_rng(seed)
        requests, now_s = [], 0.0
        while (now_s := now_s + random.exponential(1 / (CAPACITY * load_at(now_s)))) < END_S:
            input_tokens = int(np.clip(random.lognormal(6.75, 0.8), 8, 8192))
            output_tokens = int(np.clip(random.lognormal(4.9, 0.9), 1, 1000))
            service_class = classes[random.choice(3, p=[0.4, 0.4, 0.2])]
            requests.append(request_of(len(requests) + 1, now_s, input_tokens, output_tokens, service_class))
        limits = {"cost": DEVICES["h200-8b"].cost, "kv_cache_tokens": 832_000, "max_model_len": 20_480}
        simulate(requests, fleet_of(policy, classes, noise=0.03, seed=seed, **limits), END_S + 30)
        return requests

    return run


def good_share(requests, from_s, to_s):
    chosen = [one for one in requests if from_s <= one.arrival_s < to_s and one.service_class is not BATCH]
    return sum(map(is_good, chosen)) / len(chosen)


@pytest.mark.parametrize("seed", [1, 2])
def test_good_again_five_seconds_after_an_overload(replay, seed):
    def burst(now_s):
        return 5.0 if BURST_S[0] <= now_s < BURST_S[1] else 0.6

    after_s = BURST_S[1] + 5
    requests = replay("slo", burst, seed=seed)
    assert good_share(requests, *BURST_S) < 0.7  # it is an overload
    assert good_share(requests, after_s, END_S) >= 0.98
    assert good_share(replay("fcfs", burst, seed=seed), after_s, END_S) < 0.1


def test_headroom_keeps_first_tokens_near_those_of_an_idle_engine(replay):
    def p99_s(requests):
        answered = [one for one in requests if one.service_class.name == "interactive" and one.num_tokens]
        return np.percentile([one.first_s - one.arrival_s for one in answered], 99)

    unloaded_s = p99_s(replay("slo", lambda _: 0.05))
    for load in (1, 2, 3):
        assert p99_s(replay("slo", lambda _, load=load: load, headroom=0.65)) <= 2 * unloaded_s
    assert p99_s(replay("slo", lambda _: 2)) > 3 * unloaded_s
