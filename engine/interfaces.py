"""The seams of the engine: what the step loop needs of a model runner."""

from typing import Protocol

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Runs plans on a model.

    The real one is `engine.runner.model_runner.TorchModelRunner`, the oracle for tests is `engine.testing`'s.
    """

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step to its end.

        Args:
            plan: differences since the last plan and the rows of this step; without rows only the differences are
                applied.
        Returns: one sampled token per sampling row.
        Raises: EngineError: the whole step failed; the process cannot go on.
        """
        ...
