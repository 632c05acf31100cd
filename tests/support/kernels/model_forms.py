"""Forms of a small model, for tests of the check of kernels."""

import torch

from kernels.model_forms import ModelForms

SMALL = ModelForms(
    dtype=torch.float32,
    kv_dtype=torch.float32,
    weights_dtype=torch.float32,
    weights_form=None,
    hidden_size=64,
    intermediate_size=112,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=211,
    eps=1e-5,
    has_bias=False,
    has_head_norms=False,
    gate="silu_and_mul",
    sliding_windows=(None,),
    attention_soft_caps=(None,),
    logit_soft_cap=None,
    block_size=16,
)
