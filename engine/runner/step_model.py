"""What runners need of a model, whole or divided into pipeline stages."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kernels.interface import KVCache
from kernels.metadata import StateCopy, StepInputs


class StepModel(Protocol):
    """Interface of a model, or of a pipeline stage; implemented by `Decoder`, `DecoderStage` and `TransformersModel` of
    `engine.model`.

    Attributes:
        dtype: dtype of activations.
        mixes_torch: whether its steps compute with torch too, and not only with the operations of `KernelOps`.
        resumes_states: whether it continues a state by several tokens at once, so that it is worth keeping copies.
    """

    dtype: torch.dtype
    mixes_torch: bool

    @property
    def resumes_states(self) -> bool:
        """See the class."""
        ...

    def allocate_states(self, num_slots: int) -> None:
        """Allocates `num_slots` places for what layers keep of a request besides keys and values; drops those before.

        Call it before the first step.
        """
        ...

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """Copies states from slots to others, one after the other; device work."""
        ...

    def step(self, inputs: StepInputs, kv_caches: Sequence[KVCache]) -> torch.Tensor:
        """Computes one step of a ragged batch.

        Returns: logits [S, vocab_size] fp32 at `logits_indices`, or of a pipeline stage the residual stream for the
            next one: [T, hidden_size], of the last stage [S, hidden_size].
        """
        ...


class DividedModel(StepModel, Protocol):
    """A pipeline stage."""

    @property
    def hidden_size(self) -> int:
        """Columns of the residual stream."""
        ...

    @property
    def residual_dtype(self) -> torch.dtype:
        """Dtype of the residual stream."""
        ...


class FirstStage(DividedModel, Protocol):
    """The first pipeline stage, which has the output head."""

    def head(self, residual: torch.Tensor) -> torch.Tensor:
        """Computes logits [S, vocab_size] fp32 of what the last stage has returned, [S, hidden_size]."""
        ...
