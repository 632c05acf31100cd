"""The inputs of one step in one buffer, so that one copy transfers them to the device.

Host and device buffers have the same layout of sections at fixed offsets, because a recorded step (a CUDA graph or the
CPU's program) reads fixed addresses. The block table comes last and is sent as far as it is filled; everything before
it is always sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kernels.sampling import DOUBLES

Array = npt.NDArray[Any]

# Entries of logit_bias and min_tokens that are sent with every step: enough for 6 requests with the most biases allowed
# (300), or for 256 requests with 8. More entries are copied separately.
BIAS_CAPACITY = 2048

_ALIGNMENT = 256  # bytes, as in CUDA's own allocations

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepSections(Generic[T]):
    """Host arrays or device tensors at full size, N rows, B tokens and G cache groups. A step uses the first rows and
    tokens.

    Attributes:
        query_start_loc: [N + 1] int32, see `AttentionMetadata`.
        seq_lens: [N] int32.
        state_slots: [N] int32, see `AttentionMetadata`; empty for a model without state besides keys and values.
        logits_indices: [N] int64.
        doubles: [D, N] float64, the columns of `kernels.sampling.DOUBLES`.
        longs: [3, N] int64: seed, position in the output, state row.
        ints: [5, N] int32: top_k, top_logprobs, history row, number of prompt tokens, of tokens.
        forced_ids: [N] int32; valid only in steps with prompt rows.
        bias_start: [N + 1] int32.
        bias_ids, bias_values: [BIAS_CAPACITY] int32 and float32.
        input_ids, positions: [B] int64.
        slot_mapping: [G, B] int64.
        adapted_indices, adapters: [B] int64, see `AdaptedTokens`; empty without adapters.
        block_table: [G * N * max_blocks] int32.
    """

    query_start_loc: T
    seq_lens: T
    state_slots: T
    logits_indices: T
    doubles: T
    longs: T
    ints: T
    forced_ids: T
    bias_start: T
    bias_ids: T
    bias_values: T
    input_ids: T
    positions: T
    slot_mapping: T
    adapted_indices: T
    adapters: T
    block_table: T


class _Section(NamedTuple):
    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class StepLayout:
    """Offsets of the sections.

    Attributes:
        num_bytes: size of all sections.
        num_head_bytes: size without the block table.
        num_sampling_bytes: size of the sections up to those of single tokens, with all that the sampler reads.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        has_adapters: bool = False,
        has_state: bool = False,
        num_groups: int = 1,
    ) -> None:
        rows, tokens = max_num_seqs, max_num_tokens
        int32, int64 = torch.int32, torch.int64
        shapes: StepSections[tuple[torch.dtype, tuple[int, ...]]] = StepSections(
            query_start_loc=(int32, (rows + 1,)),
            seq_lens=(int32, (rows,)),
            state_slots=(int32, (rows * has_state,)),
            logits_indices=(int64, (rows,)),
            doubles=(torch.float64, (len(DOUBLES), rows)),
            longs=(int64, (3, rows)),
            ints=(int32, (5, rows)),
            forced_ids=(int32, (rows,)),
            bias_start=(int32, (rows + 1,)),
            bias_ids=(int32, (BIAS_CAPACITY,)),
            bias_values=(torch.float32, (BIAS_CAPACITY,)),
            input_ids=(int64, (tokens,)),
            positions=(int64, (tokens,)),
            slot_mapping=(int64, (num_groups, tokens)),
            adapted_indices=(int64, (tokens * has_adapters,)),
            adapters=(int64, (tokens * has_adapters,)),
            block_table=(int32, (num_groups * rows * max_blocks,)),
        )
        self._sections: dict[str, _Section] = {}
        end = 0
        for field in fields(shapes):
            dtype, shape = getattr(shapes, field.name)
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            num_bytes = dtype.itemsize * int(np.prod(shape))
            self._sections[field.name] = _Section(offset, num_bytes, shape, dtype)
            end = offset + num_bytes
        self.num_bytes = end
        self.num_head_bytes = self._sections["block_table"].offset
        self.num_sampling_bytes = self._sections["input_ids"].offset

    def arrays(self, memory: torch.Tensor) -> StepSections[Array]:
        """Returns the sections of host memory [num_bytes] uint8."""
        return self._views(lambda section: _array(memory, section))

    def tensors(self, memory: torch.Tensor) -> StepSections[torch.Tensor]:
        """Returns the sections of device memory [num_bytes] uint8.

        On a CPU each has a separate storage, because CPU operations derive the number of rows from the storage.
        """
        if memory.device.type == "cpu":
            return self._views(lambda section: torch.from_numpy(_array(memory, section)))
        return self._views(
            lambda section: (
                memory[section.offset : section.offset + section.num_bytes].view(section.dtype).view(section.shape)
            )
        )

    def _views(self, view: Callable[[_Section], T]) -> StepSections[T]:
        return StepSections(**{name: view(section) for name, section in self._sections.items()})


def by_group(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the parts [...] of a tensor [G, ...] of all groups; on a CPU with a storage each, as of `tensors`."""
    if tensor.device.type == "cpu":
        return tuple(torch.from_numpy(part.numpy()) for part in tensor)
    return tensor.unbind()


def _array(memory: torch.Tensor, section: _Section) -> Array:
    flat = memory.numpy()[section.offset : section.offset + section.num_bytes]
    dtype = torch.empty(0, dtype=section.dtype).numpy().dtype
    return flat.view(dtype).reshape(section.shape)
