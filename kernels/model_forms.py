"""The forms in which a model uses the kernels, and the errors that the check of kernels allows in them."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from kernels.delta_heads import DeltaHeads
from kernels.gates import Gate
from kernels.interface import Routing

WeightsForm = Literal[
    "int8",
    "fp8",
    "fp8 checkpoint",
    "fp8 blocks",
    "int4 groups",
    "int5 groups",
    "int6 groups",
    "int8 groups",
    "mxfp4 groups",
    "nvfp4 groups",
    "int8 by int4 groups",
    "int8 by int5 groups",
    "int8 by int6 groups",
    "int8 by int8 groups",
]

ALLOWED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.int8: 4e-1}
"""Allowed error by dtype, relative to the root mean square of the row: several rounding steps of its largest values."""

ALLOWED_FLOAT8 = 5e-1
"""Of 8-bit floats: a product of two has an error of 4 % of a row's root mean square, and the largest of thousands of
errors is four times that. A wrong result differs by 1 or more."""


class ExpertForms(NamedTuple):
    """Mixtures of experts of a model's shard.

    Attributes:
        num_experts, inner_size: how many there are, and intermediate units of each.
        routing: how they are chosen, and their gate.
        has_bias: whether the router and the layers of experts have biases.
        is_microscaled: whether their weights are in MXFP4.
        has_router: whether the router is of `KernelOps`; otherwise the caller chooses the experts.
        has_shared: whether an expert that all tokens share is added.
    """

    num_experts: int
    inner_size: int
    routing: Routing
    has_bias: bool = False
    is_microscaled: bool = False
    has_router: bool = True
    has_shared: bool = False


@dataclass(frozen=True, slots=True)
class ModelForms:
    """What decides in which forms a model uses the kernels.

    Attributes:
        dtype, kv_dtype: of activations and of the KV cache.
        weights_dtype: of stored weights that are not quantised.
        weights_form: how linear layers are quantised, by the engine or in the checkpoint; None: not at all.
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, vocab_size, eps: of the model's shard.
        value_dim: size of values that are the first numbers of the keys; None: they are stored, as long as keys.
        has_bias: whether queries, keys and values have a bias.
        has_head_norms: whether each query and key head is normed.
        has_projection_norms: whether the queries of a token are normed together, and its keys.
        has_adapters: whether tokens may have adapters.
        gate: the operation between the feed-forward layers.
        experts: mixtures of experts; None: the model has none.
        sliding_windows: the different ones of the layers; None: no window.
        attention_soft_caps: the different limits of attention scores; None: no limit.
        logit_soft_cap: limit of logits; None: no limit.
        has_sinks: whether each query head has a sink.
        block_size: tokens per block of the cache.
        multiplies_in_bf16: whether linear layers round float32 activations to bf16.
        delta_heads: sizes of layers of the gated delta rule; None: the model has none.
        has_attention_gate: whether results of attention have a gate.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    weights_dtype: torch.dtype
    weights_form: WeightsForm | None
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    has_bias: bool
    has_head_norms: bool
    gate: Gate
    sliding_windows: tuple[int | None, ...]
    attention_soft_caps: tuple[float | None, ...]
    logit_soft_cap: float | None
    block_size: int
    experts: ExpertForms | None = None
    has_sinks: bool = False
    has_projection_norms: bool = False
    multiplies_in_bf16: bool = False
    has_adapters: bool = False
    delta_heads: DeltaHeads | None = None
    has_attention_gate: bool = False
    value_dim: int | None = None

    @property
    def linear_error(self) -> float:
        """Allowed error of a linear layer."""
        if self.multiplies_in_bf16:
            return ALLOWED[torch.bfloat16]
        form = self.weights_form
        has_int8_inputs = form is not None and (form == "int8" or form.startswith("int8 by "))
        if form is None or (form.endswith(" groups") and not has_int8_inputs):  # all else has the model's dtype
            return ALLOWED[self.dtype]
        return max(ALLOWED[self.dtype], ALLOWED[torch.int8] if has_int8_inputs else ALLOWED_FLOAT8)

    @property
    def cache_error(self) -> float:
        """Allowed error of values read from the cache."""
        return max(ALLOWED[self.dtype], ALLOWED.get(self.kv_dtype, ALLOWED_FLOAT8))
