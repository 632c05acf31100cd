"""Starts the ranks of a machine, tells each what to build, and makes them one group with those of other machines."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.parallel.followers import START_TIMEOUT_S, Followers, OnFailure
from engine.parallel.group import SingleRank
from engine.parallel.leading_runner import LeadingRunner
from engine.parallel.process_group import Meeting, ProcessGroup
from engine.startup.progress import StartupProgress
from engine.startup.rank import RankParts, build_rank
from engine.startup.rank_task import RankTask
from engine.startup.rendezvous import gather_nodes


@dataclass(frozen=True, slots=True)
class Assignment:
    """First message to a follower.

    Attributes:
        rank: rank of the follower, among the ranks of all stages.
        device: device of its shard.
        meeting: where the ranks connect.
        task: what to build.
    """

    rank: int
    device: torch.device
    meeting: Meeting
    task: RankTask


def build_runner(
    task: RankTask,
    group: ProcessGroup | SingleRank,
    device: torch.device,
    startup: StartupProgress,
    on_failure: OnFailure,
    on_stopping: Callable[[], None] = lambda: None,
) -> RankParts:
    """Builds the runner of the whole model; starts the other ranks of this machine, and waits for the other machines.

    Args:
        task: what to build.
        group: group of this process, rank 0.
        device: device of rank 0; the other ranks of this machine use the following GPUs, or the same CPU.
        startup: reports the progress.
        on_failure, on_stopping: see `Followers`.
    Raises: EngineError: rank 0 could not build its shard.
    """
    if isinstance(group, SingleRank):
        return build_rank(task, group, device, startup)
    ranks = group.layout.ranks_of(0)
    links, meeting = gather_nodes(task, startup) if group.layout.num_nodes > 1 else ([], None)
    followers = Followers(
        ranks[1:],
        timeout_s=task.config.rank_timeout_s,
        on_failure=on_failure,
        on_stopping=on_stopping,
        leave=group.leave,
        links=links,
    )
    try:
        startup.begin("ranks", f"starting {group.layout.num_ranks} ranks")
        place: Meeting = followers.meeting_folder if meeting is None else meeting
        followers.assign(assignments(ranks, device, place, task)[1:])
        with followers.waiting_for("the other ranks to start", START_TIMEOUT_S):
            group.join(place, collective_timeout_s(task.config))
        parts = build_rank(task, group, device, startup)
        group.before_leaving = parts.runner.close
        startup.begin("ranks", "waiting for the other ranks")
        followers.wait_ready()
    except BaseException:
        followers.close()
        raise
    # Its kernels stand still while it waits for another rank: no sign of a hang. The followers' clock sees one.
    return parts._replace(runner=LeadingRunner(parts.runner, followers), progress=None)


def assignments(ranks: Sequence[int], device: torch.device, meeting: Meeting, task: RankTask) -> list[Assignment]:
    """Returns the assignments of the ranks of a machine: each has a GPU of its own, or all share the CPU."""
    devices = (device if device.type == "cpu" else torch.device(device.type, index) for index in range(len(ranks)))
    return [Assignment(rank, own, meeting, task) for rank, own in zip(ranks, devices, strict=True)]


def collective_timeout_s(config: EngineConfig) -> float:
    """Returns the timeout of a collective: longer than rank 0's own, which reports what hangs."""
    return 2 * max(config.rank_timeout_s, START_TIMEOUT_S)
