"""A fleet: conservation, equal seeds, and placement that follows cached prefixes."""

import random

from engine.core.latency.step_time import Coefficients, StepTimePrior
from loadgen.simulation.fleet import simulate
from loadgen.simulation.workload import NO_CLASS, Outcome, SimulatedRequest

COST = StepTimePrior(Coefficients(0.6e-3, 20.5e-6, 0.5e-6, 36e-9, 1.37e-9), 205)
BLOCK = 64


def prefix_heavy(seed, num_requests=300, num_prefixes=24):
    """Returns requests of 24 conversations with a common first block, 4,096 shared tokens each and 64 own ones."""
    rng = random.Random(seed)
    requests = []
    arrival_s = 0.0
    for index in range(1, num_requests + 1):
        arrival_s += rng.expovariate(60.0)
        prefix = rng.randrange(num_prefixes)
        blocks = (10, *(1000 * (prefix + 1) + block for block in range(63)), 10**6 + index)
        requests.append(
            SimulatedRequest(
                index, arrival_s, BLOCK * len(blocks), rng.randrange(8, 40),
                service_class=NO_CLASS, prompt_blocks=blocks, block_tokens=BLOCK,
            )
        )  # fmt: skip
    return requests


def outcome_of(requests):
    return [(r.engine, r.first_s, r.last_s, r.num_tokens, r.num_cached_tokens, r.outcome, r.reason) for r in requests]


def fleet(fleet_of, **changes):
    values = {
        "policy_text": "fcfs@2048", "num_engines": 4, "cost": COST, "kv_cache_tokens": 64 * 500, "block_size": BLOCK,
        "max_model_len": 8192, "has_prefix_cache": True, "noise": 0.03, "stall_share": 0.001,
    } | changes  # fmt: skip
    return fleet_of(values.pop("policy_text"), **values)


def test_equal_seeds_give_equal_results_and_others_do_not(fleet_of):
    runs = []
    for seed in (1, 1, 2):
        requests = prefix_heavy(7)
        run = simulate(requests, fleet(fleet_of, seed=seed))
        runs.append((outcome_of(requests), run.num_steps, run.busy_s))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_every_request_ends_once_and_all_tokens_are_counted(fleet_of):
    for policy_text, in_flight in (("fcfs@256", 1), ("fcfs-bounded@256", 2), ("shortest@2048", 2), ("static@512", 1)):
        requests = prefix_heavy(3)
        options = fleet(fleet_of, policy_text=policy_text, max_steps_in_flight=in_flight, max_num_seqs=8)
        run = simulate(requests, options)
        assert all(request.outcome is not None for request in requests)
        completed = [request for request in requests if request.outcome is Outcome.COMPLETED]
        assert all(request.num_tokens == request.output_tokens for request in completed)
        assert all(request.num_tokens == 0 for request in requests if request.outcome is Outcome.REFUSED)
        assert sum(map(len, run.gaps_s.values())) == sum(max(0, request.num_tokens - 1) for request in requests)
        if not run.num_preemptions:
            for request in completed:
                # a last chunk of one token is a one-token row
                assert 0 <= request.input_tokens - request.num_cached_tokens - request.num_computed_tokens <= 1


def test_placement_by_predicted_first_token_beats_the_rule_without_rates(fleet_of):
    """The caches of 4 engines hold 24 prefixes together, not one engine all of them."""
    figures = {}
    for knows_rates in (False, True):
        requests = prefix_heavy(5)
        simulate(requests, fleet(fleet_of, knows_rates=knows_rates))
        hits = sum(request.num_cached_tokens for request in requests) / sum(r.input_tokens for r in requests)
        mean_s = sum(request.first_s - request.arrival_s for request in requests) / len(requests)
        figures[knows_rates] = hits, mean_s
        assert len({request.engine for request in requests}) == 4
    assert figures[True][0] > figures[False][0] + 0.05
    assert figures[True][1] < 0.7 * figures[False][1]


def test_a_fleet_of_a_thousand_engines_serves_each_request(fleet_of):
    requests = prefix_heavy(1, num_requests=60)
    run = simulate(requests, fleet(fleet_of, num_engines=1000, kv_cache_tokens=64 * 130))
    assert {request.outcome for request in requests} == {Outcome.COMPLETED}
    assert len(run.engine_busy_s) == 1000


def test_all_but_the_engine_adds_its_time_to_first_tokens_and_to_what_is_left_of_targets(
    request_of, fleet_of, interactive
):
    def first_tokens(transit_s):
        requests = [request_of(1, 1.0, 8, 2, interactive), request_of(2, 40.0, 8, 2)]
        simulate(requests, fleet_of("fcfs@8", [interactive], transit_s=transit_s))
        return [request.first_s - request.arrival_s for request in requests]

    assert first_tokens(0.0) == [2.0, 2.0]
    assert first_tokens(0.5) == [2.5, 2.5]

    late = request_of(1, 1.0, 8, 2, interactive)  # first token within 4 s, refused if it cannot be
    simulate([late], fleet_of("slo@8", [interactive], transit_s=3.0))
    assert late.outcome is Outcome.REFUSED
