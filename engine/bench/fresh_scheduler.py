"""New schedulers on one loaded model, for variants that differ only in limits of the scheduler.

Every run gets a new scheduler with an empty prefix cache.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from chairlift.bench.run import Run
from chairlift.bench.workload import Workload
from engine.bench.serve import Steppable, serve
from engine.core.config import SchedulingPolicyName
from engine.core.request import Adapter
from engine.core.scheduler import Scheduler
from engine.interfaces import ModelRunner, execute
from engine.serving.parts import EngineParts


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A scheduler on a runner that is shared sequentially."""

    scheduler: Scheduler
    runner: ModelRunner


def schedule_anew(
    parts: EngineParts,
    *,
    max_num_batched_tokens: int | None = None,
    enable_prefix_caching: bool = False,
    policy: SchedulingPolicyName = "fcfs",
) -> Scheduled:
    """Returns a new scheduler over an engine's runner and its whole cache.

    Args:
        parts: the engine, whose own scheduler must be unused.
        max_num_batched_tokens: token budget of a step, at most the engine's; None is the engine's.
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
    adapters: Sequence[Adapter | None] | None = None,
) -> Run:
    """Serves a workload on a new scheduler; after_steps, adapters: see `serve`."""
    scheduled = schedule_anew(
        parts, max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=enable_prefix_caching
    )
    run = serve(scheduled, workload.prompts, workload.max_tokens, after_steps=after_steps, adapters=adapters)
    forget_requests(scheduled)
    return run


def forget_requests(parts: Steppable) -> None:
    """Makes the runner forget the finished requests, as the scheduler's next plan would."""
    now_s = time.perf_counter()
    last_plan = parts.scheduler.schedule(now_s)
    assert not last_plan.rows, f"{len(last_plan.rows)} requests are still running"
    parts.scheduler.update(last_plan, execute(parts.runner, last_plan), now_s)
