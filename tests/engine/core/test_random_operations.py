"""Random operations on the scheduler keep its invariants and its answers.

For more operations: `pytest tests/engine/core --core-operations 10000000 --timeout 0`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from engine.core.cache_groups import CacheGroups
from engine.core.drafts import DraftLimits

OPERATIONS_PER_WORLD = 250
NUM_DEFAULT_OPERATIONS = 50_000
POLICIES = ("fcfs", "priority", "static", "slo")


def run_worlds(simulate: Callable[..., Any], num_worlds: int, mode_of: Callable[[int], dict[str, Any]]) -> Counter[str]:
    """Simulates worlds of these seeds and modes; returns the sums of their totals, which end in `_total`."""
    totals: Counter[str] = Counter()
    for seed in range(num_worlds):
        stats = asdict(simulate(seed, OPERATIONS_PER_WORLD, **mode_of(seed)).scheduler.stats())
        totals.update({name: value for name, value in stats.items() if name.endswith("_total")})
    return totals


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_random_operations_keep_every_invariant_and_every_answer(
    pytestconfig: pytest.Config, simulate: Callable[..., Any], policy: str, max_steps_in_flight: int
) -> None:
    num_operations = pytestconfig.getoption("core_operations", default=None) or NUM_DEFAULT_OPERATIONS
    num_worlds = -(-num_operations // (OPERATIONS_PER_WORLD * 2 * len(POLICIES)))
    mode = {"policy": policy, "max_steps_in_flight": max_steps_in_flight}
    totals = run_worlds(simulate, num_worlds, lambda _: mode)
    # Worlds without events would prove nothing.
    assert totals["num_preemptions_total"] > num_worlds
    assert totals["prefix_cache_hits_total"] > 10 * num_worlds
    assert totals["num_generated_tokens_total"] > 50 * num_worlds
    if policy == "slo":
        assert totals["num_infeasible_total"] > num_worlds
        assert totals["num_degraded_total"] > num_worlds


@pytest.mark.parametrize("num_stages", [2, 3])
def test_so_they_do_with_steps_in_pipeline_stages(simulate: Callable[..., Any], num_stages: int) -> None:
    num_worlds = NUM_DEFAULT_OPERATIONS // (OPERATIONS_PER_WORLD * 4)
    stages = {"num_stages": num_stages, "max_steps_in_flight": num_stages}
    totals = run_worlds(simulate, num_worlds, lambda seed: {"policy": POLICIES[seed % 3], **stages})
    assert totals["num_preemptions_total"] > num_worlds
    assert totals["num_generated_tokens_total"] > 50 * num_worlds


@pytest.mark.parametrize(("num_full", "num_windowed"), [(1, 1), (1, 3), (0, 1)])
def test_so_they_do_with_sliding_windows(
    pytestconfig: pytest.Config, simulate: Callable[..., Any], num_full: int, num_windowed: int
) -> None:
    num_operations = pytestconfig.getoption("core_operations", default=None) or NUM_DEFAULT_OPERATIONS
    num_worlds = num_operations // (OPERATIONS_PER_WORLD * 4)

    def mode(seed: int) -> dict[str, Any]:
        return {"policy": POLICIES[seed % 4], "cache_groups": CacheGroups(num_full, num_windowed, 1 + seed % 9)}

    totals = run_worlds(simulate, num_worlds, mode)
    assert totals["num_preemptions_total"] > num_worlds
    assert totals["prefix_cache_hits_total"] > 10 * num_worlds
    assert totals["num_generated_tokens_total"] > 50 * num_worlds


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("num_snapshots", [1, 3, 20])
def test_so_they_do_if_the_model_keeps_state(
    monkeypatch: pytest.MonkeyPatch, simulate: Callable[..., Any], num_snapshots: int, max_steps_in_flight: int
) -> None:
    """Copies are made even where they save little: prompts are short here."""
    monkeypatch.setattr("engine.core.state_snapshots._MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr("engine.core.state_snapshots._ANSWER_STRIDE", 1)
    monkeypatch.setattr("engine.core.state_snapshots._TURN_TOKENS", 1)
    num_worlds = NUM_DEFAULT_OPERATIONS // (OPERATIONS_PER_WORLD * 9)
    mode = {"num_state_snapshots": num_snapshots, "max_steps_in_flight": max_steps_in_flight}
    totals = run_worlds(simulate, num_worlds, lambda seed: {"policy": POLICIES[seed % 4], **mode})
    assert totals["num_preemptions_total"] > num_worlds
    assert totals["prefix_cache_hits_total"] > 3 * num_worlds
    assert totals["num_generated_tokens_total"] > 50 * num_worlds


def test_so_they_do_if_the_model_keeps_state_in_pipeline_stages(
    monkeypatch: pytest.MonkeyPatch, simulate: Callable[..., Any]
) -> None:
    monkeypatch.setattr("engine.core.state_snapshots._MIN_SAVED_TOKENS", 1)
    monkeypatch.setattr("engine.core.state_snapshots._ANSWER_STRIDE", 1)
    num_worlds = NUM_DEFAULT_OPERATIONS // (OPERATIONS_PER_WORLD * 9)
    mode = {"num_state_snapshots": 6, "num_stages": 2, "max_steps_in_flight": 2}
    totals = run_worlds(simulate, num_worlds, lambda seed: {"policy": POLICIES[seed % 3], **mode})
    assert totals["prefix_cache_hits_total"] > num_worlds


@pytest.mark.parametrize("policy", ["fcfs", "priority", "static"])
@pytest.mark.parametrize(("num_full", "num_windowed"), [(1, 0), (1, 2), (0, 1)])
def test_so_they_do_with_drafts(
    pytestconfig: pytest.Config, simulate: Callable[..., Any], num_full: int, num_windowed: int, policy: str
) -> None:
    """Of two tokens that answers consist of, many a guess is right."""
    num_operations = pytestconfig.getoption("core_operations", default=None) or NUM_DEFAULT_OPERATIONS
    num_worlds = num_operations // (OPERATIONS_PER_WORLD * 9)

    def mode(seed: int) -> dict[str, Any]:
        groups = CacheGroups(num_full, num_windowed, 1 + seed % 9 if num_windowed else 0)
        drafts = DraftLimits(1 + seed % 5, 1 + seed % 3, 1)
        limits = {"max_num_seqs": 8 + seed % 8, "max_num_batched_tokens": 20 + seed % 30, "max_steps_in_flight": 1}
        if seed % 2:  # drafts take no block that a running request might need: in a tiny cache there are few
            limits["num_blocks"] = 150
        return {"policy": policy, "cache_groups": groups, "drafts": drafts, **limits}

    totals = run_worlds(simulate, num_worlds, mode)
    assert totals["num_preemptions_total"] > num_worlds
    assert totals["num_draft_tokens_total"] > 3 * num_worlds
    assert totals["num_accepted_tokens_total"] > 0.5 * num_worlds
    assert totals["num_generated_tokens_total"] > 50 * num_worlds
