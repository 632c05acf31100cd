"""The seam between model and kernels: one set of operations, several implementations.

`reference_ops()` is plain fp32 PyTorch, slow and obviously right; `cpu_ops()` is made to be fast on CPUs. Each is
imported only when asked for.
"""

from typing import Protocol

import torch

from kernels.metadata import AttentionMetadata
from kernels.sampling import SampledTokens, SamplingBatch


class KernelOps(Protocol):
    """What a model needs. T tokens in the ragged batch; tensors are contiguous in their last dimension."""

    name: str

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Linear layer: x [T, in] @ weight [out, in]^T + bias [out] -> [T, out]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm over the last dimension (arXiv:1910.07467): x / sqrt(mean(x^2) + eps) * weight. Any leading shape."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds, then norms: residual' = x + residual; returns (rms_norm(residual'), residual').

        May write residual' into `residual`.
        """
        ...

    def rotary_embedding(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Rotates q [T, num_heads, head_dim] and k [T, num_kv_heads, head_dim] in place.

        Method: arXiv:2104.09864, half-split layout. positions [T] int64 index the tables cos and sin
        [max_positions, head_dim // 2].
        """
        ...

    def store_kv_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes k, v [T, num_kv_heads, head_dim] to slots of the caches.

        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]; slot_mapping [T] int64.
        """
        ...

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
        """Causal attention of a ragged batch over a paged cache; q [T, num_heads, head_dim] -> same shape.

        A token at position p sees keys max(0, p - sliding_window + 1)..p; without a window, 0..p.
        """
        ...

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n] -> [T, n]: silu(first half) * second half (SwiGLU, arXiv:2002.05202)."""
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draws one token per row of logits [S, vocab_size] float32, by the rules of `kernels.sampling`."""
        ...


def reference_ops() -> KernelOps:
    """Plain PyTorch in fp32."""
    from kernels.reference.ops import ReferenceOps

    return ReferenceOps()


def cpu_ops() -> KernelOps:
    """Fast CPU operations; needs numba."""
    from kernels.cpu.ops import CpuOps

    return CpuOps()
