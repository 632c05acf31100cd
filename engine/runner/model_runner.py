"""The model runner: a plan goes in, one token per sampling row comes out."""

import torch

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.errors import StepError
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.runner.batch import Batch, BatchBuilder
from engine.runner.kv_cache import KVCachePlan, allocate_kv_caches
from engine.runner.request_state import RequestState
from engine.runner.sampler import SamplerOutput, sample_rows
from engine.runner.sampling_state import SamplingState
from kernels.ops import KernelOps


class TorchModelRunner:
    """`engine.interfaces.ModelRunner` on a torch model: batch -> forward -> logits -> sampler, one step at a time.

    It trusts the plan: blocks, budgets and who runs are the scheduler's decisions, and it never waits for anything but
    its own computation. All methods belong on one thread.
    """

    def __init__(
        self,
        model: Decoder,
        model_config: ModelConfig,
        kv_plan: KVCachePlan,
        ops: KernelOps,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Allocates the caches and compiles the step; kv_dtype is the model's unless said otherwise."""
        self._ops = ops
        self._state = RequestState(
            max_num_seqs=max_num_seqs,
            max_model_len=kv_plan.max_model_len,
            block_size=kv_plan.block_size,
            sampling=SamplingState(
                max_num_seqs=max_num_seqs,
                vocab_size=model_config.vocab_size,
                end_token_ids=model_config.end_token_ids,
            ),
        )
        self._builder = BatchBuilder(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=kv_plan.max_model_len,
            block_size=kv_plan.block_size,
        )
        kv_caches = allocate_kv_caches(kv_plan, model_config, kv_dtype or model.dtype, ops)
        self._step = ops.compile_step(lambda inputs: model.step(inputs, kv_caches), self._builder.largest())

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step to its end; see `engine.interfaces.ModelRunner.execute`.

        Raises: StepError: the step failed as a whole, memory for instance; state and cache can no longer be trusted.
        """
        try:
            return self._execute(plan)
        except (RuntimeError, MemoryError) as error:
            raise StepError(
                f"step {plan.step} with {len(plan.rows)} rows, {plan.num_tokens} tokens: {error}"
            ) from error

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        self._state.apply(plan)
        if not plan.rows:
            return ModelRunnerOutput(plan.step, (), {}, {})
        batch = self._builder.build(plan, self._state)
        logits = self._step(batch.inputs)
        token_ids = [-1] * len(plan.rows)
        if not len(batch.sampling_rows):
            return ModelRunnerOutput(plan.step, tuple(token_ids), {}, {})
        sampled = sample_rows(self._ops, logits, self._state, batch.state_rows)
        self._append(batch, sampled)
        rows = batch.sampling_rows.tolist()
        for row, token_id in zip(rows, sampled.token_ids.tolist(), strict=True):
            token_ids[row] = token_id
        return ModelRunnerOutput(
            step=plan.step,
            token_ids=tuple(token_ids),
            logprobs={rows[i]: logprobs for i, logprobs in sampled.logprobs.items()},
            failures={rows[i]: failure for i, failure in sampled.failures.items()},
        )

    def _append(self, batch: Batch, sampled: SamplerOutput) -> None:
        """The next step of a row reads its token from the state; a row that failed has none and will be removed."""
        drawn = sampled.token_ids >= 0
        self._state.append_tokens(batch.state_rows[drawn], sampled.token_ids[drawn])
