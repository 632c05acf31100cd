"""One layer of the decoder: attention and a gated feed-forward network, each preceded by an RMSNorm."""

import torch

from engine.model.checkpoint_part import CheckpointPart, Fill, Span
from engine.model.config import ModelConfig
from engine.model.linear import Linear
from engine.model.sharding import Sharding
from engine.parallel.group import ParallelGroup
from kernels.interface import KernelOps, KVCache, LinearInput
from kernels.metadata import AttentionMetadata


class DecoderLayer:
    """Weights and computation of one layer, or of the shard of a rank."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        rotary: tuple[torch.Tensor, torch.Tensor],
        ops: KernelOps,
        group: ParallelGroup,
        sharding: Sharding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        traits = config.traits
        self._ops = ops
        self._group = group
        self._rotary = rotary
        self._prefix = f"model.layers.{index}."
        self._eps = config.rms_norm_eps
        self._head_dim = config.head_dim
        self._sliding_window = traits.sliding_windows[index]
        hidden, intermediate = Span.whole(config.hidden_size), sharding.intermediate
        q, kv = sharding.heads.times(config.head_dim), sharding.kv_heads.times(config.head_dim)
        attention, mlp = f"{self._prefix}self_attn.", f"{self._prefix}mlp."

        def linear(prefix: str, in_features: Span, out_features: dict[str, Span], bias: bool) -> Linear:
            return Linear(prefix, in_features, out_features, bias=bias, fp8=config.fp8, dtype=dtype, device=device)

        def norm(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.qkv = linear(attention, hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, traits.qkv_bias)
        self.o = linear(attention, q, {"o_proj": hidden}, traits.o_bias)
        self.gate_up = linear(mlp, hidden, {"gate_proj": intermediate, "up_proj": intermediate}, traits.mlp_bias)
        self.down = linear(mlp, intermediate, {"down_proj": hidden}, traits.mlp_bias)
        self.input_norm = norm(config.hidden_size)
        self.post_attention_norm = norm(config.hidden_size)
        self.q_norm = norm(config.head_dim) if traits.qk_norm else None
        self.k_norm = norm(config.head_dim) if traits.qk_norm else None

    def checkpoint_parts(self) -> dict[str, CheckpointPart]:
        """Returns name in the checkpoint -> the part of a parameter that it fills; linear layers are without memory."""
        parts = self._norm_parts()
        for linear in self._linears:
            parts |= linear.checkpoint_parts()
        return parts

    def load(self, fill: Fill) -> None:
        """Fills the norms, then loads and packs one linear layer at a time."""
        fill(self._norm_parts())
        for linear in self._linears:
            linear.load(self._ops, fill)

    @property
    def _linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def _norm_parts(self) -> dict[str, CheckpointPart]:
        norms = {"input_layernorm": self.input_norm, "post_attention_layernorm": self.post_attention_norm}
        if self.q_norm is not None and self.k_norm is not None:
            norms |= {"self_attn.q_norm": self.q_norm, "self_attn.k_norm": self.k_norm}
        return {f"{self._prefix}{name}.weight": CheckpointPart.whole(norm) for name, norm in norms.items()}

    def attention(
        self,
        x: LinearInput,
        positions: torch.Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]; writes keys and values of the step, then reads the cache."""
        head_norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        q = self._ops.rotate_and_store(
            self.qkv(self._ops, x),
            positions,
            *self._rotary,
            kv_cache,
            metadata.slot_mapping,
            head_norms=head_norms,
            eps=self._eps,
        )
        out = self._ops.paged_attention(
            q, kv_cache, metadata, scale=self._head_dim**-0.5, sliding_window=self._sliding_window
        )
        return self._group.all_reduce(self.o(self._ops, out))

    def mlp(self, x: LinearInput) -> torch.Tensor:
        """Normalised input [T, hidden] -> [T, hidden]."""
        return self._group.all_reduce(self.down(self._ops, self._ops.silu_and_mul(self.gate_up(self._ops, x))))
