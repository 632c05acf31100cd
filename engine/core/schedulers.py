"""Chooses the scheduler of a configuration."""

from engine.core.config import SchedulerConfig
from engine.core.latency.scheduler import LatencyScheduler
from engine.core.scheduler import Scheduler


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """Returns the scheduler that the configuration needs."""
    return LatencyScheduler(config) if config.policy == "slo" else Scheduler(config)
