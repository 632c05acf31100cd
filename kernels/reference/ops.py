"""`KernelOps` in plain fp32 PyTorch."""

import torch

from kernels.metadata import AttentionMetadata
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.sample import sample
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.store_kv_cache import store_kv_cache
from kernels.sampling import SampledTokens, SamplingBatch


class ReferenceOps:
    """The operations that need no trust; contracts are those of `kernels.ops.KernelOps`."""

    name = "reference"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, in] @ weight [out, in]^T + bias [out] -> [T, out]."""
        return torch.nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        return add_rms_norm(x, residual, weight, eps)

    def rotary_embedding(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotates q and k in place."""
        rotary_embedding(q, k, positions, cos, sin)

    def store_kv_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes k and v to slots of the caches."""
        store_kv_cache(k, v, k_cache, v_cache, slot_mapping)

    def paged_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention of a ragged batch over a paged cache."""
        return paged_attention(q, k_cache, v_cache, metadata, scale=scale, sliding_window=sliding_window)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half."""
        return silu_and_mul(gate_up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits."""
        return sample(logits, batch)
