"""The seams of the engine: what the step loop needs of a model runner."""

from typing import Protocol

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Runs plans on a model, several at a time if it was made for it.

    `engine.runner.model_runner.TorchModelRunner` is the real one; tests use `FakeModelRunner`.
    """

    def launch(self, plan: SchedulerOutput) -> None:
        """Starts one step. It may still run when this returns, and the next one may be launched meanwhile: up to the
        scheduler's `max_steps_in_flight` of them.

        Args:
            plan: differences since the last plan and the rows of this step; without rows only the differences are
                applied. A plan without rows is collected like any other.
        Raises: EngineError: the whole step failed; the process cannot go on.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step launched and not collected.

        Returns: one sampled token per sampling row.
        Raises: EngineError: the whole step failed; the process cannot go on.
        """
        ...


def execute(runner: ModelRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    """One step from its launch to its end, for those who have no other in flight: warm-up, benchmarks, tests."""
    runner.launch(plan)
    return runner.collect()
