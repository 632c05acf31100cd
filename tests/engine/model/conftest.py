"""Fixtures of the tests of models."""

import json

import pytest

from engine.model.config import ModelConfig

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}


@pytest.fixture
def read(tmp_path):
    """read(generation_config=None, **fields of config.json; "absent": without) -> ModelConfig."""

    def read(generation_config=None, **overrides):
        values = {name: value for name, value in {**MINIMAL, **overrides}.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation_config is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
        return ModelConfig.from_dir(tmp_path)

    return read
