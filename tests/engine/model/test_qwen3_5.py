"""The fields of Qwen3.5's config.json: what does not fit, or is not computed, is named."""

import re

import pytest

from engine.errors import CheckpointError

QWEN_3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "head_dim": 16}
ATTENDING = QWEN_3_5 | {"full_attention_interval": 3}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (QWEN_3_5, "full_attention_interval gives none of 3 layers full_attention"),
        (QWEN_3_5 | {"full_attention_interval": 0}, "full_attention_interval is 0, expected an integer >= 1"),
        (
            QWEN_3_5 | {"layer_types": ["linear_attention"] * 3},
            "layer_types gives none of 3 layers full_attention, which one must have",
        ),
        (
            QWEN_3_5 | {"layer_types": ["full_attention", ["linear_attention"], "mamba"]},
            "layer_types has ['linear_attention'], mamba, supported are full_attention, linear_attention",
        ),
        (QWEN_3_5 | {"layer_types": "full_attention"}, "expected a list with one entry for each of 3 layers"),
        (
            ATTENDING | {"hidden_act": "gelu_pytorch_tanh"},
            "is 'gelu_pytorch_tanh', supported are silu; or --model-impl",
        ),
        (
            ATTENDING | {"linear_num_key_heads": 3},
            "linear_num_value_heads is 32, not a multiple of linear_num_key_heads 3",
        ),
        (ATTENDING | {"linear_value_head_dim": 24}, "linear_value_head_dim is 24, expected a multiple of 16"),
        (ATTENDING | {"linear_key_head_dim": 2**17}, "linear_key_head_dim is 131072, the maximum is 65536"),
        (
            ATTENDING | {"architectures": ["Qwen3_5MoeForCausalLM"], "shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size is 0, expected an integer >= 1",
        ),
        (
            ATTENDING | {"architectures": ["Qwen3_5MoeForCausalLM"], "num_experts_per_tok": 300},
            "num_experts_per_tok is 300, num_experts is 256",
        ),
        (
            ATTENDING | {"architectures": ["Qwen3NextForCausalLM"], "shared_expert_intermediate_size": 2**23},
            "shared_expert_intermediate_size is 8388608, the maximum is 4194304",
        ),
        (
            ATTENDING | {"architectures": ["Qwen3NextForCausalLM"], "mlp_only_layers": "1"},
            "mlp_only_layers is '1', expected a list of numbers of layers",
        ),
        (ATTENDING | {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, expected an integer >= 2"),
    ],
)
def test_bad_field_is_named(read, tmp_path, overrides, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        read(**overrides)
    assert str(tmp_path / "config.json") in str(caught.value)
