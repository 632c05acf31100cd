"""Many schedulers on one loaded model: contestants that differ in the scheduler's limits only need not load it twice.

Every run gets a scheduler of its own, whose prefix cache is empty: what it finds there, this run has put there.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.serve import Steppable, serve
from engine.core.config import SchedulingPolicyName
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner, execute
from engine.serving.engine import EngineParts


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduler of its own on a runner that others use too, one after the other."""

    scheduler: Scheduler
    runner: ModelRunner


def schedule_anew(
    parts: EngineParts,
    *,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool = False,
    policy: SchedulingPolicyName = "fcfs",
) -> Scheduled:
    """A new scheduler over an engine's runner and its whole cache.

    Args:
        parts: the engine; its own scheduler must not have served.
        max_num_batched_tokens: budget of a step, at most the engine's; None is the engine's.
        enable_prefix_caching, policy: see `SchedulerConfig`.
    """
    own = parts.scheduler.config
    budget = own.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
    assert budget <= own.max_num_batched_tokens, f"{budget} tokens in steps of {own.max_num_batched_tokens}"
    config = replace(own, max_num_batched_tokens=budget, enable_prefix_caching=enable_prefix_caching, policy=policy)
    return Scheduled(Scheduler(config), parts.runner)


def serve_anew(
    parts: EngineParts,
    workload: Workload,
    *,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool = False,
    after_steps: Sequence[int] | None = None,
) -> Run:
    """`serve` on a new scheduler."""
    scheduled = schedule_anew(
        parts, max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching
    )
    run = serve(scheduled, workload.prompts, workload.max_tokens, after_steps=after_steps)
    forget_requests(scheduled)
    return run


def forget_requests(parts: Steppable) -> None:
    """Tells the runner which requests have ended: what the next plan would say, were it of the same scheduler."""
    now_s = time.perf_counter()
    farewell = parts.scheduler.schedule(now_s)
    assert not farewell.rows, f"{len(farewell.rows)} requests are still running"
    parts.scheduler.update(farewell, execute(parts.runner, farewell), now_s)
