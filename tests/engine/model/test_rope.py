"""Settings of rotations that transformers does not read."""

import math

import pytest

from engine.model.config_fields import ConfigFields
from engine.model.rope import RopeConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def attention_factor(**settings):
    fields = {"max_position_embeddings": 131072, "rope_theta": 1e6, "rope_scaling": {**YARN, **settings}}
    return RopeConfig.from_fields(ConfigFields("config.json", fields)).attention_factor


def test_attn_factor_multiplies_the_usual_temperature_of_yarn():
    """As in vLLM: DeepSeek-R1-0528-Qwen3-8B is published with the one that makes it 1."""
    assert attention_factor(attn_factor=0.8782488562869419) == pytest.approx(1.0)
    assert attention_factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(attn_factor=0.5, attention_factor=1.2) == 1.2
