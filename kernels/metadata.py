"""Description of a ragged batch for all layers, built once per step by the runner: tensors only."""

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch


class GroupBlocks(NamedTuple):
    """Where the layers of a group store the KV of a batch, see `AttentionMetadata`."""

    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A ragged batch over a paged KV cache.

    Row i holds query tokens query_start_loc[i]:query_start_loc[i+1]; they are the last of the first seq_lens[i] tokens
    of its sequence, whose KV lies in the blocks block_table[i]. Tokens from query_start_loc[-1] on are padding: they
    belong to no row, and their slots are -1.

    Attributes:
        query_start_loc: [num_reqs + 1] int32, prefix sums of the query lengths (FlashAttention: cu_seqlens_q).
        seq_lens: [num_reqs] int32, tokens including this step's.
        block_table: [num_reqs, max_blocks] int32; entries past a row's last block are not read. Those in front of a
            layer's window name any blocks, whose content has no effect.
        slot_mapping: [num_tokens] int64, block_id * block_size + offset of each token of this step.
        block_size: tokens per block.
        max_query_len, max_seq_len: maxima, known on the host.
        num_one_token_reqs: number of leading rows with one query token, known on the host; 0 is always valid.
        group: the layers whose KV lies in these blocks, a number; see `of_group`.
        other_groups: of layers with other blocks, those of groups 1, 2 and so on.
        state_slots: [num_reqs] int32, where layers with state keep that of each row's request; a request keeps its slot
            from its first step to its last. None: the model has no such layers.
        derived: what kernels have computed from these tensors for all layers of the step, by keys of their own; valid
            while the tensors keep their values. `dataclasses.replace` returns metadata without it.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    max_query_len: int
    max_seq_len: int
    num_one_token_reqs: int = 0
    group: int = 0
    other_groups: tuple[GroupBlocks, ...] = ()
    state_slots: torch.Tensor | None = None
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    _others: dict[int, "AttentionMetadata"] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of_group(self, group: int) -> "AttentionMetadata":
        """Returns the batch with the blocks of another group of layers; what is derived does not depend on blocks."""
        if group == self.group:
            return self
        if group not in self._others:
            block_table, slot_mapping = self.other_groups[group - 1]
            other = replace(self, block_table=block_table, slot_mapping=slot_mapping, group=group, other_groups=())
            object.__setattr__(other, "derived", self.derived)
            self._others[group] = other
        return self._others[group]

    def one_token_rows(self, num_reqs: int, num_tokens: int) -> "AttentionMetadata":
        """Returns views of the first rows, of one token each, and tokens; those behind the rows are padding."""
        return replace(
            self,
            query_start_loc=self.query_start_loc[: num_reqs + 1],
            seq_lens=self.seq_lens[:num_reqs],
            block_table=self.block_table[:num_reqs],
            slot_mapping=self.slot_mapping[:num_tokens],
            other_groups=tuple(
                GroupBlocks(blocks.block_table[:num_reqs], blocks.slot_mapping[:num_tokens])
                for blocks in self.other_groups
            ),
            state_slots=None if self.state_slots is None else self.state_slots[:num_reqs],
            max_query_len=1,
            num_one_token_reqs=num_reqs,
        )

    @property
    def num_reqs(self) -> int:
        """Rows of the batch."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return self.slot_mapping.shape[0]


@dataclass(frozen=True, slots=True)
class AdaptedTokens:
    """The tokens of a step whose linear layers have an adapter, those of the same adapter side by side.

    Attributes:
        indices: [M] int64, places of the tokens in the batch, each at most once.
        adapters: [M] int64, ascending, the adapter of each. On a GPU entries with adapter -1, which stand for no
            token, may follow: a recorded step has as many as tokens.
        derived: what kernels have computed from these tensors, see `AttentionMetadata`.
    """

    indices: torch.Tensor
    adapters: torch.Tensor
    derived: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)


class Span(NamedTuple):
    """The tokens of one row of a batch, known on the host.

    Attributes:
        slot: of the request's state; a request keeps its slot from its first step to its last.
        first, end: tokens first to end - 1 of the batch.
        is_first: whether they are the first tokens of the request, which has no state yet.
    """

    slot: int
    first: int
    end: int
    is_first: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.end - self.first


class StateCopy(NamedTuple):
    """Slots from and to which the state of a request is copied."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step of the model.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        metadata: rows of the batch and places of their KV.
        logits_indices: [S] int64, tokens whose logits are computed.
        logits: [S, vocab_size] float32, to which the step writes its result; None: it allocates one.
        adapted: tokens with an adapter; None: the model has no adapters.
        residual: [num_tokens, hidden_size], what the previous pipeline stage returned, and the step overwrites; None:
            this is the first.
        spans: tokens of each row, for a model that keeps state besides keys and values with torch; otherwise empty.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata
    logits_indices: torch.Tensor
    logits: torch.Tensor | None = None
    adapted: AdaptedTokens | None = None
    residual: torch.Tensor | None = None
    spans: tuple[Span, ...] = ()
