"""The runner of a pipeline stage behind the first: it knows no tokens and samples none."""

from collections import deque
from dataclasses import replace
from functools import partial

import torch

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.model.model_shape import ModelShape
from engine.parallel.group import ParallelGroup
from engine.runner.batch import Batch, BatchBuilder
from engine.runner.kv_cache import KVCachePlan, allocate_kv_caches
from engine.runner.model_runner import RunnerOptions, closed, request_state, step_error
from engine.runner.step_model import DividedModel
from engine.runner.stream import Event, InlineStream
from kernels.interface import KernelOps, Step


class StageRunner:
    """`engine.interfaces.ModelRunner` of one stage: each step receives, computes its layers, and sends onward.

    A plan says everything that layers depend on besides the residual stream: rows, positions and blocks. The tokens of
    its results stand for unknown ones.
    """

    def __init__(
        self,
        model: DividedModel,
        shape: ModelShape,
        kv_plan: KVCachePlan,
        ops: KernelOps,
        group: ParallelGroup,
        options: RunnerOptions,
    ) -> None:
        """Allocates buffers and caches, and compiles the step.

        Args:
            model: layers of the stage, on the device of the stream.
            group: the stages.
            shape, kv_plan, ops, options: as of `TorchModelRunner`.
        """
        self._group = group
        self._is_last = group.stage == group.num_stages - 1
        self._stream = options.stream or InlineStream()
        self._state = request_state(shape, kv_plan, options.max_num_seqs)
        self._builder = BatchBuilder(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=kv_plan.max_model_len,
            block_size=kv_plan.block_size,
            num_groups=kv_plan.groups.num_groups,
            stream=self._stream,
            max_steps_in_flight=options.max_steps_in_flight,
            has_state=bool(shape.state_bytes),
        )
        residual_shape = options.max_num_batched_tokens, model.hidden_size
        self._residual = torch.zeros(residual_shape, dtype=model.residual_dtype, device=self._stream.device)
        self._in_flight: deque[tuple[SchedulerOutput, Event | None]] = deque()
        kv_caches = allocate_kv_caches(kv_plan, shape, options.kv_dtype or model.dtype, ops)
        model.allocate_states(options.max_num_seqs + kv_plan.num_snapshots)
        self._copy_states = model.copy_states
        self._step: Step = ops.compile_step(
            lambda inputs: model.step(inputs, kv_caches),
            replace(self._builder.largest(), residual=self._residual),
            yields_logits=False,
        )

    def close(self) -> None:
        """Destroys the recorded step; no step may be launched afterwards."""
        self._step = closed

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> None:
        """Queues one step; see `engine.interfaces.ModelRunner.launch`.

        Raises: StepError: the step failed, or another stage has gone.
        """
        try:
            self._state.apply(plan)
            if not plan.rows:
                self._in_flight.append((plan, None))
                return
            self._stream.run(partial(self._compute, self._builder.build(plan, self._state)))
        except (RuntimeError, MemoryError) as error:
            raise step_error(plan, error) from error
        self._in_flight.append((plan, self._stream.mark()))

    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step; see `engine.interfaces.ModelRunner.collect`.

        Raises: StepError: the step failed.
        """
        plan, done = self._in_flight.popleft()
        if done is not None:
            try:
                done.wait()
            except RuntimeError as error:
                raise step_error(plan, error) from error
        return ModelRunnerOutput(plan.step, tuple(0 if row.samples else -1 for row in plan.rows), {}, {})

    def _compute(self, batch: Batch) -> None:
        """Device work."""
        batch.upload()
        self._copy_states(batch.state_copies)
        residual = self._residual[: batch.inputs.input_ids.shape[0]]
        self._group.receive(residual)
        result = self._step(replace(batch.inputs, residual=residual))
        if not self._is_last:
            self._group.send_onward(result)
        elif batch.num_logits:
            self._group.send_onward(result[: batch.num_logits])
