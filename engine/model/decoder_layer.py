"""One layer of the decoder: attention, then a gated feed-forward network, both behind an RMSNorm."""

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from kernels.metadata import AttentionMetadata
from kernels.ops import KernelOps, KVCache, LinearWeights


@dataclass(frozen=True, slots=True)
class DecoderTraits:
    """In what an architecture differs from the skeleton.

    Attributes:
        sliding_windows: per layer: how many tokens a token sees, itself included; None sees all before it.
        qkv_bias, o_bias, mlp_bias: which projections add a bias.
        qk_norm: RMSNorm over each query and key head before the rotation.
    """

    sliding_windows: tuple[int | None, ...]
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class Linear:
    """Weights of y = x W^T + b. Several projections of the same input lie in one matrix, so that it is one product.

    They are loaded as they are in the checkpoint, then packed as the operations like them.
    """

    def __init__(
        self, in_features: int, out_features: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        total = sum(out_features.values())
        self._out_features = out_features
        self._weight: torch.Tensor | None = torch.empty(total, in_features, dtype=dtype, device=device)
        self._bias = torch.empty(total, dtype=dtype, device=device) if bias else None
        self._packed: LinearWeights = None

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the part of weight or bias it fills; before `pack`."""
        assert self._weight is not None, f"{prefix} is packed"
        tensors = {}
        start = 0
        for name, size in self._out_features.items():
            tensors[f"{prefix}{name}.weight"] = self._weight[start : start + size]
            if self._bias is not None:
                tensors[f"{prefix}{name}.bias"] = self._bias[start : start + size]
            start += size
        return tensors

    def pack(self, ops: KernelOps) -> None:
        """Hands the weights over; the memory they were loaded to is free afterwards, unless it is shared."""
        assert self._weight is not None, "packed twice"
        self._packed = ops.pack_linear(self._weight, self._bias)
        self._weight = self._bias = None

    def __call__(self, ops: KernelOps, x: torch.Tensor) -> torch.Tensor:
        """X [T, in_features] -> [T, sum of out_features]."""
        return ops.linear(x, self._packed)


class DecoderLayer:
    """Weights and computation of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        traits: DecoderTraits,
        index: int,
        ops: KernelOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._ops = ops
        self._prefix = f"model.layers.{index}."
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._sliding_window = traits.sliding_windows[index]
        hidden, n = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(in_features: int, out_features: dict[str, int], bias: bool) -> Linear:
            return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)

        def norm(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.qkv = linear(hidden, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, traits.qkv_bias)
        self.o = linear(q_size, {"o_proj": hidden}, traits.o_bias)
        self.gate_up = linear(hidden, {"gate_proj": n, "up_proj": n}, traits.mlp_bias)
        self.down = linear(n, {"down_proj": hidden}, traits.mlp_bias)
        self.input_norm = norm(hidden)
        self.post_attention_norm = norm(hidden)
        self.q_norm = norm(config.head_dim) if traits.qk_norm else None
        self.k_norm = norm(config.head_dim) if traits.qk_norm else None

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the (part of a) parameter it fills."""
        attention, mlp = f"{self._prefix}self_attn.", f"{self._prefix}mlp."
        tensors = {
            f"{self._prefix}input_layernorm.weight": self.input_norm,
            f"{self._prefix}post_attention_layernorm.weight": self.post_attention_norm,
            **self.qkv.checkpoint_tensors(attention),
            **self.o.checkpoint_tensors(attention),
            **self.gate_up.checkpoint_tensors(mlp),
            **self.down.checkpoint_tensors(mlp),
        }
        if self.q_norm is not None and self.k_norm is not None:
            tensors |= {f"{attention}q_norm.weight": self.q_norm, f"{attention}k_norm.weight": self.k_norm}
        return tensors

    def pack(self) -> None:
        """Makes the loaded weights ready for use."""
        for linear in (self.qkv, self.o, self.gate_up, self.down):
            linear.pack(self._ops)

    def attention(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Normed input [T, hidden] -> [T, hidden]; writes this step's keys and values first, then reads the cache."""
        head_norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        q = self._ops.rotate_and_store(
            self.qkv(self._ops, x),
            positions,
            *rotary,
            kv_cache,
            metadata.slot_mapping,
            head_norms=head_norms,
            eps=self._eps,
        )
        out = self._ops.paged_attention(
            q, kv_cache, metadata, scale=self._head_dim**-0.5, sliding_window=self._sliding_window
        )
        return self.o(self._ops, out)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Normed input [T, hidden] -> [T, hidden]."""
        return self.down(self._ops, self._ops.silu_and_mul(self.gate_up(self._ops, x)))
