"""Chooses the scheduler of a configuration."""

from engine.core.config import SchedulerConfig
from engine.core.draft_scheduler import DraftScheduler
from engine.core.latency.scheduler import LatencyScheduler
from engine.core.scheduler import Scheduler


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """Returns the scheduler that the configuration needs."""
    if config.policy == "slo":
        return LatencyScheduler(config)
    return Scheduler(config) if config.drafts is None else DraftScheduler(config)
