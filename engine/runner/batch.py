"""Packs a plan into the tensors of one ragged batch: all tokens concatenated, padded for recorded steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.outputs import SchedulerOutput
from engine.runner.buckets import padded_size
from engine.runner.draft_rows import NO_DRAFT_ROWS, DraftRows, fill_draft_rows
from engine.runner.prompt_rows import NO_PROMPT_ROWS, PromptRows, fill_prompt_rows
from engine.runner.request_state import RequestState
from engine.runner.sampling_state import Biases, Columns, Int32Array, Int64Array, sampling_batch
from engine.runner.step_buffers import BIAS_CAPACITY, Array, StepLayout, StepSections, by_group
from engine.runner.step_views import StepViews
from engine.runner.stream import InlineStream, Stream
from kernels.metadata import AdaptedTokens, AttentionMetadata, GroupBlocks, Span, StateCopy, StepInputs
from kernels.sampling import SamplingBatch


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one step. Its tensors are views of device buffers, which hold this batch from its `upload` to the next.

    Attributes:
        inputs: input of the model. Logits are computed for the last known tokens of S sampling rows, then for D drafted
            tokens or for F positions whose next prompt token needs a log-probability.
        sampling_rows: [S], rows of the plan that sample.
        prompts: the F prompt rows.
        drafts: the D draft rows.
        columns: sampling parameters of S + D rows, known on the host, including rows in `RequestState`.
        biases: logit biases of the sampling rows.
        staged_biases: the same in host memory that the device can copy, if they exceed the buffer.
        num_unresolved: leading input ids that may be references to tokens not yet known on the host.
        sections: the device buffer of the sampler's input.
        views: views of the device buffers.
        upload: device work that fills the model's buffer, which usually is the sampler's too.
        upload_sampling: device work that fills the sampler's buffer, if it is another one.
        state_copies: of states besides keys and values, before the step.
    """

    inputs: StepInputs
    sampling_rows: Int64Array
    prompts: PromptRows
    drafts: DraftRows
    columns: Columns
    biases: Biases
    staged_biases: tuple[torch.Tensor, ...]
    num_unresolved: int
    sections: StepSections[torch.Tensor]
    views: StepViews
    upload: Callable[[], None]
    upload_sampling: Callable[[], None]
    state_copies: tuple[StateCopy, ...]

    @property
    def num_logits(self) -> int:
        """S + D + F."""
        return len(self.columns.rows) + len(self.prompts.plan_rows)

    @property
    def result_rows(self) -> Int64Array:
        """[S + F], the plan row of each sampler row."""
        if self.prompts is NO_PROMPT_ROWS:
            return self.sampling_rows
        return np.concatenate((self.sampling_rows, self.prompts.plan_rows))

    @property
    def top_logprobs(self) -> Int32Array:
        """[S + D + F], number of alternatives per row; -1: no logprobs."""
        if self.prompts is NO_PROMPT_ROWS:
            return self.columns.top_logprobs
        return np.concatenate((self.columns.top_logprobs, self.prompts.top_logprobs))

    @property
    def max_top_logprobs(self) -> int:
        """Largest number of alternatives."""
        return max(self.columns.max_top_logprobs, self.prompts.max_top_logprobs)

    @property
    def device_state_rows(self) -> torch.Tensor:
        """[S] int64: the rows in `RequestState`, on the device."""
        return self.sections.longs[2, : len(self.sampling_rows)]

    def sampling(self, history: torch.Tensor) -> SamplingBatch:
        """Returns the sampler's input, see `sampling_batch`. Device work: copies biases that exceed the buffer."""
        num_biases, num_forced = len(self.biases.ids), len(self.prompts.plan_rows)
        if not num_biases and not num_forced:
            return self.views.unbiased(self.columns, history)
        if num_biases <= BIAS_CAPACITY:
            ids, values = self.sections.bias_ids[:num_biases], self.sections.bias_values[:num_biases]
        else:
            ids, values = (tensor.to(history.device, non_blocking=True) for tensor in self.staged_biases)
        return sampling_batch(
            self.columns,
            self.sections,
            history,
            ids,
            values,
            num_forced=num_forced,
            max_top_logprobs=self.prompts.max_top_logprobs,
        )


class BatchBuilder:
    """Packs batches into buffers allocated once: one on the device, and one on the host for each step in flight.

    Host buffers are used in turn: the step that used a buffer before must have been collected. On a CPU, host and
    device share one buffer, and the next batch may be built when the step is done.

    If other steps begin before a step samples (`samples_later`), the sampler has a device buffer of its own, and a CPU
    shares none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        stream: Stream | None = None,
        max_steps_in_flight: int = 1,
        decode_buckets: Sequence[int] = (),
        mixed_buckets: Sequence[int] = (),
        has_adapters: bool = False,
        samples_later: bool = False,
        has_state: bool = False,
        has_spans: bool = False,
        num_groups: int = 1,
    ) -> None:
        """Allocates the buffers.

        Args:
            max_num_seqs, max_num_batched_tokens: most rows and tokens of a batch.
            max_model_len, block_size: determine the width of the block table.
            stream: device of the buffers; None: the host.
            max_steps_in_flight: batches that may be built before the first is collected.
            decode_buckets: ascending numbers of rows to which batches of one-token rows are padded; larger batches are
                not padded.
            mixed_buckets: ascending numbers of tokens to which other batches are padded, up to max_num_batched_tokens.
            has_adapters: whether requests may have adapters.
            samples_later: whether the next batch may be uploaded before this one samples.
            has_state: whether the model keeps state besides keys and values.
            has_spans: whether it takes the tokens of each row from the host.
            num_groups: block tables of a request.
        """
        self._stream = stream = stream or InlineStream()
        self._block_size = block_size
        self._decode_buckets, self._mixed_buckets = tuple(decode_buckets), tuple(mixed_buckets)
        self._max_num_seqs = max_num_seqs
        self._max_blocks = -(-max_model_len // block_size)
        max_num_tokens = max((max_num_batched_tokens, *self._decode_buckets[-1:]))
        self._has_adapters = has_adapters
        self._has_state, self._has_spans = has_state, has_spans
        layout = StepLayout(
            max_num_seqs=max_num_seqs,
            max_num_tokens=max_num_tokens,
            max_blocks=self._max_blocks,
            has_adapters=has_adapters,
            has_state=has_state,
            num_groups=num_groups,
        )
        self._num_head_bytes = layout.num_head_bytes
        self._is_shared = stream.is_inline and not samples_later
        num_buffers = 1 if self._is_shared else max_steps_in_flight
        self._host = [stream.host_buffer(layout.num_bytes) for _ in range(num_buffers)]
        self._arrays = [layout.arrays(memory) for memory in self._host]
        self._columns: list[Columns | None] = [None] * num_buffers  # content of each buffer
        self._turn = 0
        tables_shape = (num_groups, max_num_seqs, self._max_blocks)
        if self._is_shared:
            self._memory = self._host[0].zero_()
            self._sections = layout.tensors(self._memory)
            self._block_tables = self._sections.block_table.view(tables_shape)
        else:
            self._memory = torch.zeros_like(self._host[0], device=stream.device)
            self._sections = layout.tensors(self._memory)
            self._block_tables = torch.zeros(tables_shape, dtype=torch.int32, device=stream.device)
        self._sampling_memory: torch.Tensor | None = None
        self._sampling_sections = self._sections
        if samples_later:
            memory = torch.zeros_like(self._memory)
            self._sampling_sections = layout.tensors(memory)
            self._sampling_memory = memory[: layout.num_sampling_bytes]
        self._groups = tuple(map(GroupBlocks, self._block_tables, by_group(self._sections.slot_mapping)))
        self._views = StepViews(self._sections, self._sampling_sections, self._groups)
        # Start with a valid batch of padding rows: graphs are recorded before the first real batch.
        self._sections.query_start_loc.copy_(torch.arange(max_num_seqs + 1))
        self._sections.slot_mapping.fill_(-1)
        if not stream.is_inline:
            self._sections.adapters.fill_(-1)

    def largest(self) -> StepInputs:
        """Returns the complete buffers, which initially hold padding rows."""
        sections = self._sections
        return StepInputs(
            input_ids=sections.input_ids,
            positions=sections.positions,
            metadata=AttentionMetadata(
                query_start_loc=sections.query_start_loc,
                seq_lens=sections.seq_lens,
                block_table=self._groups[0].block_table,
                slot_mapping=self._groups[0].slot_mapping,
                other_groups=self._groups[1:],
                state_slots=sections.state_slots if self._has_state else None,
                block_size=self._block_size,
                max_query_len=sections.input_ids.shape[0],
                max_seq_len=self._max_blocks * self._block_size,
            ),
            logits_indices=sections.logits_indices,
            adapted=self._adapted(sections.adapters.shape[0]),
        )

    def build(self, plan: SchedulerOutput, state: RequestState) -> Batch:
        """Packs a plan of at least one row, after `state` has applied its differences.

        Returns: the batch, which is on the device when its `upload` is done.
        """
        turn = self._turn
        self._turn = (turn + 1) % len(self._host)
        host = self._arrays[turn]

        request_ids, scheduled, computed, _, samples, prompt_logits = zip(*plan.rows, strict=True)
        rows = state.rows_of(request_ids)
        query_lens = np.array(scheduled, dtype=np.int64)
        starts = np.array(computed, dtype=np.int64)
        num_rows, num_tokens = len(rows), plan.num_tokens
        is_decode = num_tokens == num_rows
        if is_decode:
            size = width = padded_size(num_rows, self._decode_buckets)
        else:
            size, width = num_rows, padded_size(num_tokens, self._mixed_buckets)

        query_start_loc = host.query_start_loc
        query_start_loc[0] = 0
        np.cumsum(query_lens, out=query_start_loc[1 : num_rows + 1])
        seq_lens = host.seq_lens[:num_rows]
        seq_lens[:] = starts + query_lens
        max_seq_len = int(seq_lens.max())
        if self._has_state:
            host.state_slots[:num_rows] = rows
        if is_decode:
            num_narrow = num_rows
            token_rows, token_positions = rows, starts
        else:
            num_narrow = int((query_lens == 1).sum())
            token_rows = np.repeat(rows, query_lens)
            token_positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:num_rows], query_lens)
        host.input_ids[:num_tokens] = state.token_ids[token_rows, token_positions]
        host.positions[:num_tokens] = token_positions
        blocks, offsets = np.divmod(token_positions, self._block_size)
        for block_table, slot_mapping in zip(state.block_table, host.slot_mapping, strict=True):
            slot_mapping[:num_tokens] = block_table[token_rows, blocks].astype(np.int64) * self._block_size + offsets
        num_adapted = _sort_adapted(state.adapters[token_rows], host) if self._has_adapters else 0
        sampling_rows = np.flatnonzero(samples)
        num_samples = len(sampling_rows)
        host.logits_indices[:num_samples] = query_start_loc[sampling_rows + 1] - 1
        state_rows = rows[sampling_rows]
        lengths = state.num_tokens[state_rows]
        drafts = NO_DRAFT_ROWS
        if plan.drafts:
            drafts = fill_draft_rows(plan, rows, query_start_loc, host.logits_indices)
            state_rows = np.concatenate((state_rows, drafts.state_rows))
            lengths = state.num_tokens[state_rows]
            lengths[num_samples:] += drafts.offsets
        columns = self._columns[turn]
        if (
            columns is None
            or columns.version != state.sampling.version
            or columns.rows.tobytes() != state_rows.tobytes()
        ):
            columns = state.sampling.fill(state_rows, state.num_prompt_tokens[state_rows], host)
            self._columns[turn] = columns
        biases = state.sampling.advance(columns, lengths, host)
        prompts = fill_prompt_rows(plan, rows, num_samples, state, host) if any(prompt_logits) else NO_PROMPT_ROWS
        num_logits = len(state_rows) + len(prompts.plan_rows)
        host.logits_indices[num_logits : min(width, self._max_num_seqs)] = 0  # a recorded step computes as many logits
        if width > num_tokens:
            _pad_tokens(host, num_tokens, width)
        if size > num_rows:
            _pad_rows(host, num_rows, size)
        if num_adapted:
            host.adapted_indices[num_adapted:width] = 0
            host.adapters[num_adapted:width] = -1  # a recorded step reads as many as it has tokens
        upload = self._pack_table(turn, state.block_table, rows, -(-max_seq_len // self._block_size))
        # Only the last token of a row can be pending in a step in flight, and such a row has one token.
        has_unknown = state.has_tokens_in_flight and bool((host.input_ids[:num_narrow] < 0).any())

        views = self._views.step(width, size, num_logits)
        return Batch(
            inputs=StepInputs(
                input_ids=views.input_ids,
                positions=views.positions,
                metadata=AttentionMetadata(
                    query_start_loc=views.query_start_loc,
                    seq_lens=views.seq_lens,
                    block_table=views.groups[0].block_table,
                    slot_mapping=views.groups[0].slot_mapping,
                    other_groups=views.groups[1:],
                    state_slots=views.state_slots,
                    block_size=self._block_size,
                    max_query_len=int(query_lens.max()),
                    max_seq_len=max_seq_len,
                    num_one_token_reqs=num_narrow + size - num_rows,
                ),
                logits_indices=views.logits_indices,
                adapted=self._adapted(num_adapted),
                spans=_spans(rows, query_start_loc, starts) if self._has_spans else (),
            ),
            sampling_rows=sampling_rows,
            prompts=prompts,
            drafts=drafts,
            columns=columns,
            biases=biases,
            staged_biases=tuple(map(self._staged, biases)) if len(biases.ids) > BIAS_CAPACITY else (),
            num_unresolved=num_narrow if has_unknown else 0,
            sections=self._sampling_sections,
            views=self._views,
            upload=upload,
            upload_sampling=self._copy_of_sampling(turn),
            state_copies=state.state_copies(plan) if self._has_state else (),
        )

    def _adapted(self, num_tokens: int) -> AdaptedTokens | None:
        """Returns views of the first adapted tokens."""
        if not self._has_adapters:
            return None
        return AdaptedTokens(self._sections.adapted_indices[:num_tokens], self._sections.adapters[:num_tokens])

    def _staged(self, array: Array) -> torch.Tensor:
        """Copies an array to host memory that the device can copy asynchronously."""
        source = torch.from_numpy(array)
        return self._stream.host_buffer(array.nbytes).view(source.dtype).copy_(source)

    def _pack_table(self, turn: int, block_table: Array, rows: Int64Array, width: int) -> Callable[[], None]:
        """Packs the first `width` blocks of each row and group.

        A full-width table would dominate the transfer: 8 MB for 256 rows with max_model_len 131,072, of which rows of
        2,048 tokens fill 128 KB.

        Returns: device work that copies the packed batch to the device.
        """
        num_rows = len(rows)
        packed = self._arrays[turn].block_table
        if self._is_shared:
            for target, table in zip(packed.reshape(self._block_tables.shape), block_table, strict=True):
                target[:num_rows, :width] = table[rows, :width]
            return _nothing
        shape = (len(block_table), num_rows, width)
        size = shape[0] * num_rows * width
        for target, table in zip(packed[:size].reshape(shape), block_table, strict=True):
            target[:] = table[rows, :width]
        num_bytes = self._num_head_bytes + size * packed.itemsize
        source, memory = self._host[turn][:num_bytes], self._memory[:num_bytes]
        sent, received = self._sections.block_table[:size].view(shape), self._block_tables[:, :num_rows, :width]

        def upload() -> None:
            memory.copy_(source, non_blocking=True)
            received.copy_(sent)

        return upload

    def _copy_of_sampling(self, turn: int) -> Callable[[], None]:
        """Returns device work that copies the sampler's input of a host buffer, if it has a device buffer."""
        target = self._sampling_memory
        if target is None:
            return _nothing
        source = self._host[turn][: len(target)]

        def upload() -> None:
            target.copy_(source, non_blocking=True)

        return upload


def _spans(rows: Int64Array, query_start_loc: Array, starts: Int64Array) -> tuple[Span, ...]:
    """Returns the tokens of each row; a request's slot is its row of `RequestState`."""
    bounds = query_start_loc[: len(rows) + 1].tolist()
    return tuple(map(Span, rows.tolist(), bounds[:-1], bounds[1:], (starts == 0).tolist()))


def _sort_adapted(adapters: Int64Array, host: StepSections[Array]) -> int:
    """Writes the tokens with an adapter, sorted by it; returns their number. adapters: [tokens], -1: none."""
    indices = np.flatnonzero(adapters >= 0)
    indices = indices[np.argsort(adapters[indices], kind="stable")]
    host.adapted_indices[: len(indices)] = indices
    host.adapters[: len(indices)] = adapters[indices]
    return len(indices)


def _pad_tokens(host: StepSections[Array], num_tokens: int, width: int) -> None:
    """Fills tokens num_tokens to width - 1 with padding."""
    padding = slice(num_tokens, width)
    host.input_ids[padding] = 0
    host.positions[padding] = 0
    host.slot_mapping[:, padding] = -1


def _pad_rows(host: StepSections[Array], num_rows: int, size: int) -> None:
    """Fills rows num_rows to size - 1 of a batch of one-token rows with padding."""
    host.query_start_loc[num_rows + 1 : size + 1] = np.arange(num_rows + 1, size + 1)
    host.seq_lens[num_rows:size] = 0


def _nothing() -> None:
    """Copies nothing, because host and device share a buffer."""
