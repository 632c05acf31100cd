"""Rotations: their settings in config.json, and tables equal to those of transformers."""

import math
import re

import pytest
import torch
import transformers

from engine.errors import CheckpointError
from engine.model.config_fields import ConfigFields
from engine.model.rope import RopeConfig
from engine.model.rotary_tables import inverse_frequencies, rotary_tables
from tests.support.engine.checkpoints import LLAMA3

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def attention_factor(**settings):
    fields = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": {**YARN, **settings}}
    return RopeConfig.from_fields(ConfigFields("config.json", fields)).attention_factor


def test_attn_factor_multiplies_the_usual_temperature_of_yarn():
    """As in vLLM: DeepSeek-R1-0528-Qwen3-8B is published with the one that makes it 1."""
    assert attention_factor(attn_factor=0.8782488562869419) == pytest.approx(1.0)
    assert attention_factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(attn_factor=0.5, attention_factor=1.2) == 1.2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, {**LLAMA3, "rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        ),
    ],
)
def test_rope_fields_of_old_and_new_checkpoints(read, old, new):
    assert read(**old).traits == read(rope_parameters=new).traits


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": {**LLAMA3, "rope_theta": 3e4}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 3e4}, "rope_scaling": {}},
        {"rope_scaling": LLAMA3, "original_max_position_embeddings": 256},
    ],
    ids=["its own theta", "theta beside it", "another type", "empty", "original context beside it"],
)
def test_a_scaling_that_is_added_to_rope_parameters_replaces_them_as_in_transformers(read, tmp_path, fields):
    """Model cards advise to add `rope_scaling` to config.json, which may be a newer file with `rope_parameters`."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = read(model_type="llama", head_dim=64, **fields)
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    torch.testing.assert_close(inverse_frequencies(config.traits.ropes[0], 64), theirs.inv_freq)


@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Olmo3ForCausalLM"])
def test_a_scaling_beside_rotations_by_layer_completes_that_of_layers_without_a_window(read, tmp_path, architecture):
    model_type = getattr(transformers, architecture).config_class.model_type
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    sections = {"full_attention": {"rope_type": "default", "rope_theta": 3e4}}
    ours = read(
        architectures=[architecture],
        model_type=model_type,
        layer_types=["full_attention"] * 3,
        rope_parameters=sections,
        rope_scaling=rope,
    )
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["full_attention"]
    assert (ours.traits.ropes[0].theta, ours.traits.ropes[0].rope_type) == (theirs["rope_theta"], theirs["rope_type"])
    assert theirs == {**rope, "rope_theta": 3e4}


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
def test_a_scaling_without_the_theta_of_rope_parameters_is_refused(read, architecture):
    """`transformers` rotates with the default theta, and answers with noise."""
    with pytest.raises(CheckpointError, match=r"rope_theta is 1000000\.0 and rope_scaling, which replaces"):
        read(
            architectures=[architecture],
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
        )


def test_llama3_frequencies_keep_short_wavelengths_and_divide_long_ones():
    rope = RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)
    plain, scaled = inverse_frequencies(RopeConfig(5e5), 128), inverse_frequencies(rope, 128)
    turns = 8192 * plain / (2 * torch.pi)
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    assert torch.allclose(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    assert ((scaled[between] <= plain[between]) & (scaled[between] >= plain[between] / 8)).all()


def test_rotary_tables_hold_the_angle_of_each_position():
    cos, sin = rotary_tables(RopeConfig(), 8, 100, torch.device("cpu"))
    angles = 57 * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(cos[57].double(), angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[57].double(), angles.sin(), atol=1e-5, rtol=0)


def theirs_tables(path, length):
    """Cosines and sines that transformers computes for a request of some length, [length, head_dim // 2]."""
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rotary = Phi3RotaryEmbedding(transformers.AutoConfig.from_pretrained(path))
    cos, sin = rotary(torch.zeros(1), torch.arange(length)[None])
    pairs = cos.shape[-1] // 2
    return cos[0, :, :pairs], sin[0, :, :pairs]


@pytest.mark.parametrize("served", [64, 65, 512])
@pytest.mark.parametrize("rotated", [1.0, 0.75])
def test_longrope_has_the_factors_of_a_request_of_the_served_length(read, tmp_path, served, rotated):
    pairs = int(32 * rotated) // 2
    rope = {
        "rope_type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [2 + i for i in range(pairs)],
    }
    config = read(
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        num_attention_heads=2,
        original_max_position_embeddings=64,
        partial_rotary_factor=rotated,
        rope_scaling=rope,
    )
    cos, sin = rotary_tables(config.traits.ropes[0], config.head_dim, served, torch.device("cpu"))
    their_cos, their_sin = theirs_tables(tmp_path, served)
    torch.testing.assert_close(cos[:, :pairs], their_cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(sin[:, :pairs], their_sin, atol=1e-5, rtol=0)
    assert cos[:, pairs:].eq(1).all()
    assert sin[:, pairs:].eq(0).all()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"beta_fast": 8, "beta_slow": 2},
        {"truncate": False},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 1.0, "mscale_all_dim": 0},
        {"attention_factor": 1.2},
    ],
    ids=str,
)
def test_yarn_equals_that_of_transformers_and_extends_the_context(read, tmp_path, settings):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, **settings}
    config = read(model_type="llama", head_dim=64, rope_theta=1e6, rope_scaling=rope)
    assert config.max_position_embeddings == 2048
    cos, sin = rotary_tables(config.traits.ropes[0], 64, 2048, torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    their_cos, their_sin = theirs(torch.zeros(1), torch.arange(2048)[None])
    torch.testing.assert_close(cos, their_cos[0, :, :32], atol=5e-4, rtol=0)  # of angles of up to 2,048, in fp32
    torch.testing.assert_close(sin, their_sin[0, :, :32], atol=5e-4, rtol=0)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 3.3},
        {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 512},
        {**LLAMA3, "factor": 7.0, "high_freq_factor": 3.0},
        {
            "rope_type": "longrope",
            "short_factor": [1 + 0.1 * i for i in range(16)],
            "long_factor": [2 + 0.7 * i for i in range(16)],
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_frequencies_have_the_bits_of_those_of_transformers(read, tmp_path, rope, is_long):
    """At position 131,072 one bit of the fastest is an angle of 0.008."""
    config = read(model_type="llama", head_dim=32, rope_theta=1e4, rope_scaling=rope)
    theirs, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope["rope_type"]](
        transformers.AutoConfig.from_pretrained(tmp_path), torch.device("cpu"), seq_len=64 + is_long
    )
    assert torch.equal(inverse_frequencies(config.traits.ropes[0], 32, is_long=is_long), theirs)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor is 0.7, which rotates 11 of 16 dimensions"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}},
            "short_factor of the rotation has 1 numbers, heads with 16 rotated dimensions require 8",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": "x"}},
            "short_factor is 'x', expected a list of numbers > 0",
        ),
    ],
)
def test_a_rotation_that_does_not_fit_the_heads_is_named(read, overrides, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        read(architectures=["Phi3ForCausalLM"], **overrides)
