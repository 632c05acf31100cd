"""Rank 0's model runner, which sends every call to all ranks."""

from collections import deque

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.interfaces import ModelRunner
from engine.parallel.followers import Followers
from engine.parallel.plans import COLLECT, pack_plan


class LeadingRunner:
    """`engine.interfaces.ModelRunner` over all ranks.

    The followers get the same calls in the same order, so that all runners have the same state and the collectives of
    their steps match. Their results are the same tokens and are dropped.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        """Args: runner: of rank 0. followers: ready."""
        self._runner = runner
        self._followers = followers
        self._steps: deque[int] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """Starts one step on every rank."""
        with self._followers.waiting_for(f"step {plan.step}"):
            self._followers.send(pack_plan(plan))  # first, so that all ranks start together
            self._runner.launch(plan)
        self._steps.append(plan.step)

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step."""
        with self._followers.waiting_for(f"step {self._steps.popleft()}"):
            self._followers.send(COLLECT)
            return self._runner.collect()

    def close(self) -> None:
        """Ends the other ranks."""
        self._followers.close()
