"""Rank 0's model runner: what it is told, all ranks are told."""

from collections import deque

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.interfaces import ModelRunner
from engine.parallel.followers import Followers
from engine.parallel.plans import COLLECT, pack_plan


class LeadingRunner:
    """`engine.interfaces.ModelRunner` over all ranks.

    The followers get the same calls in the same order, so every rank's runner is in the same state, and the collectives
    in their steps meet. Their own results are the same tokens, and nobody asks for them.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        """Args: runner: of rank 0. followers: ready."""
        self._runner = runner
        self._followers = followers
        self._steps: deque[int] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        """Starts one step on every rank."""
        with self._followers.waiting_for(f"step {plan.step}"):
            self._followers.send(pack_plan(plan))  # first, so that they begin while we do
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
