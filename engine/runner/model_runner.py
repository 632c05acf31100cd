"""The model runner: executes plans and returns the tokens of sampling rows, with up to a few steps in flight."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.errors import DeviceError, StepError
from engine.model.model_shape import ModelShape
from engine.runner.batch import Batch, BatchBuilder
from engine.runner.device_tokens import DeviceTokens
from engine.runner.draft_rows import NO_DRAFT_ROWS
from engine.runner.kv_cache import KVCachePlan, allocate_kv_caches
from engine.runner.request_state import PendingTokens, RequestState
from engine.runner.row_masks import MaskedRow, RowMasks, accept, are_known
from engine.runner.sampler import SampledBuffer
from engine.runner.sampling_state import SamplingState
from engine.runner.step_model import StepModel
from engine.runner.stream import Event, InlineStream, Stream
from kernels.interface import KernelOps, Step
from kernels.metadata import StepInputs
from kernels.sampling import TokenMasks


@dataclass(slots=True)
class StepInFlight:
    """A launched step with rows.

    Attributes:
        masked: rows under constraints.
        histories: state row and tokens of new rows with penalties, to be uploaded first.
        is_computed: whether its forward pass has been queued.
        logits: output of the forward pass, input of the sampler.
        owned: [n] int64, in host memory that the device can copy, the samples whose requests still have their rows;
            None: all.
        done: event after its last work; None until sampling has been queued.
    """

    batch: Batch
    pending: PendingTokens
    results: SampledBuffer
    masked: list[MaskedRow]
    histories: list[tuple[int, list[torch.Tensor]]]
    is_computed: bool = False
    logits: torch.Tensor | None = None
    owned: torch.Tensor | None = None
    done: Event | None = None


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How a runner makes its steps.

    Attributes:
        max_num_seqs, max_num_batched_tokens: most rows and tokens of a step.
        kv_dtype: dtype of the cache; None: the model's.
        stream: stream of the steps; None: the host's thread.
        max_steps_in_flight: steps that may be launched before the first is collected.
        max_logprobs: most alternatives per row.
        decode_buckets, mixed_buckets, has_adapters: see `BatchBuilder`; pipeline stages have none of them.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    kv_dtype: torch.dtype | None = None
    stream: Stream | None = None
    max_steps_in_flight: int = 1
    max_logprobs: int = 20
    decode_buckets: Sequence[int] = ()
    mixed_buckets: Sequence[int] = ()
    has_adapters: bool = False


class TorchModelRunner:
    """`engine.interfaces.ModelRunner` on a torch model: batch -> forward -> logits -> sampler.

    `launch` only queues work on a stream, and a step reads the tokens of the previous step on the device, so that the
    next step can be launched while one runs. The plan is trusted: the scheduler decides about blocks, budgets and rows.
    All methods must be called on one thread.

    A row whose mask depends on the previous token can be sampled only when the host knows that token: sampling is
    queued when the previous step has been collected. The forward pass is queued earlier, so the device stays busy.

    `FirstStageRunner` derives from it for pipeline stages: it overrides what is done to begin, deliver and end a step.

    Memory of work in flight: each step has a host buffer for its batch and one for its results, both reused when it has
    been collected. Device memory is read and written in the order of the stream.

    Attributes:
        samples_when_collected: whether a step is sampled only when it is collected, after others may have begun.
    """

    samples_when_collected: ClassVar[bool] = False

    def __init__(
        self,
        model: StepModel,
        shape: ModelShape,
        kv_plan: KVCachePlan,
        ops: KernelOps,
        options: RunnerOptions,
    ) -> None:
        """Allocates buffers and caches, and compiles the step.

        Args:
            model: model on the device of the stream.
            shape: of the rank's shard.
            kv_plan: size of the cache.
            ops: operations of model and sampler.
            options: how steps are made.
        """
        self._ops = ops
        self._stream = options.stream or InlineStream()
        self._max_steps_in_flight = max_steps_in_flight = options.max_steps_in_flight
        max_num_seqs = options.max_num_seqs
        self._state = request_state(shape, kv_plan, max_num_seqs)
        self._builder = BatchBuilder(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=kv_plan.max_model_len,
            block_size=kv_plan.block_size,
            num_groups=kv_plan.groups.num_groups,
            stream=self._stream,
            max_steps_in_flight=max_steps_in_flight,
            decode_buckets=options.decode_buckets,
            mixed_buckets=options.mixed_buckets,
            has_adapters=options.has_adapters,
            samples_later=self.samples_when_collected,
            has_state=bool(shape.state_bytes),
            has_spans=model.mixes_torch and bool(shape.state_bytes),
        )
        self._tokens = DeviceTokens(
            self._state.token_ids,
            self._stream,
            max_steps_in_flight=max_steps_in_flight,
            is_ahead=False if self.samples_when_collected else None,
        )
        self._results = deque(
            SampledBuffer(self._stream, max_num_seqs, options.max_logprobs) for _ in range(max_steps_in_flight)
        )
        self._masks = RowMasks(
            max_num_seqs=max_num_seqs,
            vocab_size=shape.vocab_size,
            stream=self._stream,
            max_steps_in_flight=max_steps_in_flight,
        )
        self._in_flight: deque[tuple[SchedulerOutput, StepInFlight | None]] = deque()
        self._unsampled: deque[StepInFlight] = deque()  # steps whose draws have not been queued
        kv_caches = allocate_kv_caches(kv_plan, shape, options.kv_dtype or model.dtype, ops)
        model.allocate_states(max_num_seqs + kv_plan.num_snapshots)
        self._copy_states = model.copy_states
        self._step: Step = ops.compile_step(
            lambda inputs: model.step(inputs, kv_caches),
            self._builder.largest(),
            options.decode_buckets,
            options.mixed_buckets,
            mixes_torch=model.mixes_torch,
            yields_logits=not self.samples_when_collected,
        )

    @property
    def num_filled_masks(self) -> int:
        """Masks of constrained rows computed so far."""
        return self._masks.num_filled

    def close(self) -> None:
        """Destroys the recorded steps; no step may be launched afterwards."""
        self._step = closed

    @torch.inference_mode()
    def launch(self, plan: SchedulerOutput) -> None:
        """Queues one step; see `engine.interfaces.ModelRunner.launch`.

        Raises: StepError: the whole step failed, such as out of memory; the engine must not continue. DeviceError if
            the device failed, in this step or the previous one.
        """
        assert len(self._in_flight) < self._max_steps_in_flight, f"{len(self._in_flight)} steps are in flight"
        try:
            self._state.apply(plan)
            self._masks.apply(plan)
            self._in_flight.append((plan, self._launch(plan) if plan.rows else None))
        except (RuntimeError, MemoryError) as error:
            raise step_error(plan, error) from error

    @torch.inference_mode()
    def collect(self) -> ModelRunnerOutput:
        """Waits for the oldest step; see `engine.interfaces.ModelRunner.collect`.

        Raises: StepError: the whole step or the device failed.
        """
        plan, step = self._in_flight.popleft()
        if step is None:
            return ModelRunnerOutput(plan.step, (), {}, {})
        batch, num_samples = step.batch, len(step.batch.sampling_rows)
        try:
            self._end(step)
            assert step.done is not None, f"step {plan.step} was not sampled when it was collected"
            step.done.wait()
            sampled = step.results.read(batch.top_logprobs, batch.max_top_logprobs)
            self._state.write_tokens(step.pending, sampled.token_ids[:num_samples])
            draft_tokens: tuple[tuple[int, ...], ...] = ()
            if batch.drafts is not NO_DRAFT_ROWS:
                draft_tokens = batch.drafts.confirmed(sampled.token_ids)
                self._state.extend(step.pending, draft_tokens)
            if step.masked:
                for row in step.masked:
                    if row.sample in sampled.failures and row.constraint.error:
                        sampled.failures[row.sample] = row.constraint.error
                accept(step.masked, sampled.token_ids)
            self._queue_steps()
        except (RuntimeError, MemoryError) as error:
            raise step_error(plan, error) from error
        rows, token_ids = batch.result_rows.tolist(), sampled.token_ids[:num_samples].tolist()
        if num_samples < len(plan.rows):
            drawn, token_ids = token_ids, [-1] * len(plan.rows)
            for row, token_id in zip(rows, drawn, strict=False):
                token_ids[row] = token_id
        self._results.append(step.results)
        return ModelRunnerOutput(
            step=plan.step,
            token_ids=tuple(token_ids),
            logprobs={rows[i]: logprobs for i, logprobs in sampled.logprobs.items() if i < num_samples},
            failures={rows[i]: failure for i, failure in sampled.failures.items() if i < len(rows)},
            prompt_logprobs=batch.prompts.logprobs(sampled.logprobs, num_samples),
            draft_tokens=draft_tokens,
        )

    def _launch(self, plan: SchedulerOutput) -> StepInFlight:
        batch = self._builder.build(plan, self._state)
        results = self._results.popleft()
        columns, num_samples = batch.columns, len(batch.sampling_rows)
        pending = self._state.reserve_tokens(columns.rows[:num_samples], len(plan.drafts))
        masked = self._masks.masked_rows(plan, batch.sampling_rows, pending, columns.num_prompt_tokens[:num_samples])
        step = StepInFlight(batch, pending, results, masked, self._stage_histories(plan))
        self._begin(step)
        return step

    def _begin(self, step: StepInFlight) -> None:
        """Queues what a step can do when it is launched."""
        self._unsampled.append(step)
        self._queue_steps()

    def _end(self, step: StepInFlight) -> None:
        """Queues what a step still has to do when it is collected; by then all of it is queued."""

    def _queue_steps(self) -> None:
        """Queues forward passes and sampling of launched steps, in order, as far as their masks are known."""
        while self._unsampled:
            step = self._unsampled[0]
            if not step.is_computed:
                step.is_computed = True
                self._stream.run(partial(self._compute, step))
            if not self._queue_sampling(step):
                return
            self._unsampled.popleft()

    def _queue_sampling(self, step: StepInFlight) -> bool:
        """Queues the sampling of a step; returns False, without a change, if its masks are not known yet."""
        masks = None
        if step.masked:
            if not are_known(step.masked):
                return False
            masks = self._masks.prepare(step.masked, step.batch.num_logits)
        self._stream.run(partial(self._sample, step, masks))
        step.done = self._stream.mark()
        return True

    def _compute(self, step: StepInFlight) -> None:
        """Device work: the forward pass."""
        for row, token_ids in step.histories:
            self._tokens.upload(row, token_ids)
        batch = step.batch
        batch.upload()
        self._copy_states(batch.state_copies)
        if batch.num_unresolved:
            self._tokens.resolve(batch.inputs.input_ids[: batch.num_unresolved])
        self._deliver(step, self._step(batch.inputs))

    def _deliver(self, step: StepInFlight, result: torch.Tensor) -> None:
        """Device work: passes the result of the forward pass on to the sampler."""
        step.logits = result

    def _sample(self, step: StepInFlight, masks: Callable[[], TokenMasks] | None) -> None:
        """Device work: sampling."""
        batch = step.batch
        if not batch.num_logits:
            return
        assert step.logits is not None, "a step is sampled before its forward pass"
        sampling = batch.sampling(self._tokens.history)
        if masks is not None:
            sampling = replace(sampling, masks=masks())
        sampled = self._ops.sample(step.logits, sampling)
        step.logits = None
        if not self._tokens.is_host_record:
            state_rows = batch.device_state_rows
            added = state_rows, sampling.num_tokens[: len(state_rows)], sampled.token_ids[: len(state_rows)]
            if step.owned is not None:
                owned = step.owned.to(state_rows.device, non_blocking=True)
                added = added[0][owned], added[1][owned], added[2][owned]
            self._tokens.append(*added, with_history=batch.columns.any_penalised)
        step.results.receive(sampled, sampling.max_top_logprobs)

    def _stage_histories(self, plan: SchedulerOutput) -> list[tuple[int, list[torch.Tensor]]]:
        """Stages the tokens of new requests with penalties, unless the device reads the host's record."""
        if self._tokens.is_host_record:
            return []
        rows = self._state.rows_of(request.request_id for request in plan.new_requests).tolist()
        return [
            (row, self._tokens.stage(self._state.token_ids[row, : len(request.token_ids)]))
            for row, request in zip(rows, plan.new_requests, strict=True)
            if self._state.sampling.is_penalised(row)
        ]


def request_state(shape: ModelShape, kv_plan: KVCachePlan, max_num_seqs: int) -> RequestState:
    """Returns the empty state of a runner's requests."""
    return RequestState(
        max_num_seqs=max_num_seqs,
        max_model_len=kv_plan.max_model_len,
        block_size=kv_plan.block_size,
        num_groups=kv_plan.groups.num_groups,
        sampling=SamplingState(
            max_num_seqs=max_num_seqs, vocab_size=shape.vocab_size, end_token_ids=shape.end_token_ids
        ),
    )


def closed(_inputs: StepInputs) -> torch.Tensor:
    """Stands for the step of a runner that is closed."""
    raise RuntimeError("the runner is closed")


def step_error(plan: SchedulerOutput, error: Exception) -> StepError:
    """Returns the error of a failed step, with its numbers."""
    step = f"step {plan.step} with {len(plan.rows)} rows, {plan.num_tokens} tokens"
    if isinstance(error, torch.AcceleratorError):  # the rest of the text is debugging advice
        return DeviceError(f"{step}: {str(error).splitlines()[0]}")
    return StepError(f"{step}: {error}")
