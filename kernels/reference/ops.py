"""`KernelOps` in plain fp32 PyTorch."""

from collections.abc import Sequence

import torch

from kernels.interface import Step
from kernels.metadata import AttentionMetadata, StepInputs
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotate_and_store import rotate_and_store
from kernels.reference.sample import sample
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.sampling import SampledTokens, SamplingBatch

Weights = tuple[torch.Tensor, torch.Tensor | None]
Cache = tuple[torch.Tensor, torch.Tensor]


class ReferenceOps:
    """The operations that need no trust; contracts are those of `kernels.interface.KernelOps`.

    A cache is keys and values, each [num_blocks, block_size, num_kv_heads, head_dim].
    """

    name = "reference"

    def pack_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        for_logits: bool = False,  # noqa: ARG002 - none is quantised
    ) -> Weights:
        """Weights as they are."""
        return weight, bias

    def pack_quantized(
        self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> Weights:
        """Weights as they are meant."""
        return (values.float() * scales.float().reshape(-1, 1)).to(dtype), bias

    def make_kv_cache(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> Cache:
        """Zeros."""
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def compile_step(self, step: Step, largest: StepInputs, decode_sizes: Sequence[int] = ()) -> Step:  # noqa: ARG002
        """The step itself."""
        return step

    def gather_rows(self, table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of a table."""
        return table[indices]

    def linear(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """[T, in] @ weight [out, in]^T + bias [out] -> [T, out]."""
        return torch.nn.functional.linear(x, *weights)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        for_linear: bool = False,  # noqa: ARG002 - `linear` takes tensors
    ) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        for_linear: bool = False,  # noqa: ARG002 - `linear` takes tensors
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, weight, eps)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_cache: Cache,
        slot_mapping: torch.Tensor,
        *,
        head_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor:
        """Rotated queries; keys and values go to the cache."""
        return rotate_and_store(qkv, positions, cos, sin, kv_cache, slot_mapping, head_norms, eps)

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_cache: Cache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """Causal attention of a ragged batch over a paged cache."""
        out = paged_attention(q, *kv_cache, metadata, scale=scale, sliding_window=sliding_window, soft_cap=soft_cap)
        return out.flatten(1)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        return silu_and_mul(gate_up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits."""
        return sample(logits, batch)
