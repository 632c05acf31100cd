"""One layer of the decoder: attention, then a gated feed-forward network, both behind an RMSNorm."""

from dataclasses import dataclass

import torch

from engine.model.config import ModelConfig
from kernels.metadata import AttentionMetadata
from kernels.ops import KernelOps


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

    Attributes:
        weight: [sum of out_features, in_features].
        bias: [sum of out_features] or None.
    """

    def __init__(
        self, in_features: int, out_features: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        total = sum(out_features.values())
        self._out_features = out_features
        self.weight = torch.empty(total, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(total, dtype=dtype, device=device) if bias else None

    def checkpoint_tensors(self, prefix: str) -> dict[str, torch.Tensor]:
        """Name in the checkpoint -> the part of weight or bias it fills."""
        tensors = {}
        start = 0
        for name, size in self._out_features.items():
            tensors[f"{prefix}{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                tensors[f"{prefix}{name}.bias"] = self.bias[start : start + size]
            start += size
        return tensors


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
        self._num_heads, self._num_kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
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

    def attention(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Normed input [T, hidden] -> [T, hidden]; writes this step's keys and values first, then reads the cache."""
        ops = self._ops
        qkv = ops.linear(x, self.qkv.weight, self.qkv.bias).view(x.shape[0], -1, self._head_dim)
        q, k, v = qkv.tensor_split((self._num_heads, self._num_heads + self._num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.rms_norm(q, self.q_norm, self._eps), ops.rms_norm(k, self.k_norm, self._eps)
        ops.rotary_embedding(q, k, positions, *rotary)
        ops.store_kv_cache(k, v, *kv_cache, metadata.slot_mapping)
        out = ops.paged_attention(
            q, *kv_cache, metadata, scale=self._head_dim**-0.5, sliding_window=self._sliding_window
        )
        return ops.linear(out.flatten(1), self.o.weight, self.o.bias)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Normed input [T, hidden] -> [T, hidden]."""
        gate_up = self._ops.linear(x, self.gate_up.weight, self.gate_up.bias)
        return self._ops.linear(self._ops.silu_and_mul(gate_up), self.down.weight, self.down.bias)
