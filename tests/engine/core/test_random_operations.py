"""Random operations on the scheduler keep its invariants and its answers.

For more operations: `pytest tests/engine/core --core-operations 10000000 --timeout 0`.
"""

from collections.abc import Callable
from typing import Any

import pytest

from engine.core.cache_groups import CacheGroups

OPERATIONS_PER_WORLD = 250
NUM_DEFAULT_OPERATIONS = 50_000
POLICIES = ("fcfs", "priority", "static", "slo")


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_operations_keep_every_invariant_and_every_answer(
    pytestconfig: pytest.Config, simulate: Callable[..., Any], policy: str, max_steps_in_flight: int
) -> None:
    num_operations = pytestconfig.getoption("core_operations", default=None) or NUM_DEFAULT_OPERATIONS
    num_worlds = -(-num_operations // (OPERATIONS_PER_WORLD * 2 * len(POLICIES)))
    num_preemptions = num_hits = num_generated = num_infeasible = num_degraded = 0
    for seed in range(num_worlds):
        world = simulate(seed, OPERATIONS_PER_WORLD, policy=policy, max_steps_in_flight=max_steps_in_flight)
        stats = world.scheduler.stats()
        num_preemptions += stats.num_preemptions_total
        num_hits += stats.prefix_cache_hits_total
        num_generated += stats.num_generated_tokens_total
        num_infeasible += stats.num_infeasible_total
        num_degraded += stats.num_degraded_total
    # Worlds without events would prove nothing.
    assert num_preemptions > num_worlds
    assert num_hits > 10 * num_worlds
    assert num_generated > 50 * num_worlds
    if policy == "slo":
        assert num_infeasible > num_worlds
        assert num_degraded > num_worlds


@pytest.mark.parametrize("num_stages", [2, 3])
def test_so_they_do_with_steps_in_pipeline_stages(simulate: Callable[..., Any], num_stages: int) -> None:
    num_preemptions = num_generated = 0
    num_worlds = NUM_DEFAULT_OPERATIONS // (OPERATIONS_PER_WORLD * 4)
    for seed in range(num_worlds):
        policy = POLICIES[seed % 3]
        world = simulate(
            seed, OPERATIONS_PER_WORLD, policy=policy, num_stages=num_stages, max_steps_in_flight=num_stages
        )
        stats = world.scheduler.stats()
        num_preemptions += stats.num_preemptions_total
        num_generated += stats.num_generated_tokens_total
    assert num_preemptions > num_worlds
    assert num_generated > 50 * num_worlds


@pytest.mark.parametrize(("num_full", "num_windowed"), [(1, 1), (1, 3), (0, 1)])
def test_so_they_do_with_sliding_windows(
    pytestconfig: pytest.Config, simulate: Callable[..., Any], num_full: int, num_windowed: int
) -> None:
    num_operations = pytestconfig.getoption("core_operations", default=None) or NUM_DEFAULT_OPERATIONS
    num_worlds = num_operations // (OPERATIONS_PER_WORLD * 4)
    num_preemptions = num_hits = num_generated = 0
    for seed in range(num_worlds):
        world = simulate(
            seed,
            OPERATIONS_PER_WORLD,
            policy=POLICIES[seed % 4],
            cache_groups=CacheGroups(num_full, num_windowed, window=1 + seed % 9),
        )
        stats = world.scheduler.stats()
        num_preemptions += stats.num_preemptions_total
        num_hits += stats.prefix_cache_hits_total
        num_generated += stats.num_generated_tokens_total
    assert num_preemptions > num_worlds
    assert num_hits > 10 * num_worlds
    assert num_generated > 50 * num_worlds
