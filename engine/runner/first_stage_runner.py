"""The runner of the first of several pipeline stages, which has the embedding and the output head, and samples."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from engine.model.model_shape import ModelShape
from engine.parallel.group import ParallelGroup
from engine.runner.kv_cache import KVCachePlan
from engine.runner.model_runner import RunnerOptions, StepInFlight, TorchModelRunner
from engine.runner.step_model import FirstStage
from kernels.interface import KernelOps, Step
from kernels.metadata import StepInputs
from kernels.sampling import TokenMasks


class FirstStageRunner(TorchModelRunner):
    """A `TorchModelRunner` whose steps go through other stages before they are sampled.

    `launch` computes the layers of this stage and sends the result onward. `collect` receives what the last stage
    returns, and samples. So the next step can be in this stage while one is in another. The other stages have a
    `StageRunner`.
    """

    samples_when_collected = True

    def __init__(
        self,
        model: FirstStage,
        shape: ModelShape,
        kv_plan: KVCachePlan,
        ops: KernelOps,
        group: ParallelGroup,
        options: RunnerOptions,
    ) -> None:
        """Allocates buffers and caches, and compiles the step.

        Args:
            model: layers of the stage and the output head, on the device of the stream.
            group: the stages.
            shape, kv_plan, ops, options: as of `TorchModelRunner`.
        """
        super().__init__(model, shape, kv_plan, ops, options)
        self._group = group
        self._residual = torch.zeros(
            options.max_num_seqs, model.hidden_size, dtype=model.residual_dtype, device=self._stream.device
        )

        def head(inputs: StepInputs) -> torch.Tensor:
            assert inputs.residual is not None
            return model.head(inputs.residual)

        # A step of its own, so that the kernels of the head and of the sampler are compiled at start too.
        self._head: Step = ops.compile_step(
            head, replace(self._builder.largest(), residual=self._residual), mixes_torch=True
        )

    def _begin(self, step: StepInFlight) -> None:
        self._stream.run(partial(self._compute, step))

    def _deliver(self, step: StepInFlight, result: torch.Tensor) -> None:  # noqa: ARG002 - the base class's signature
        self._group.send_onward(result)

    def _end(self, step: StepInFlight) -> None:
        """Queues the end of a step that has been through the other stages.

        Requests may have left since its launch, and others have their rows: tokens are not added to those.
        """
        is_owned = self._state.is_owned(step.pending)
        if not is_owned.all():
            owned = torch.from_numpy(np.flatnonzero(is_owned))
            step.owned = self._stream.host_buffer(owned.nbytes).view(torch.int64).copy_(owned)
        is_queued = self._queue_sampling(step)
        assert is_queued, "the tokens before a sample are known when no other row of its request is in flight"

    def _sample(self, step: StepInFlight, masks: Callable[[], TokenMasks] | None) -> None:
        if num_logits := step.batch.num_logits:
            step.batch.upload_sampling()
            residual = self._residual[:num_logits]
            self._group.receive(residual)
            step.logits = self._head(replace(step.batch.inputs, residual=residual))
        super()._sample(step, masks)
