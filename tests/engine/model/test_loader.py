"""Which dtype is served where."""

import re

import pytest
import torch

from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.loader import resolve_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def config(make_checkpoint):
    return ModelConfig.from_dir(make_checkpoint("llama", dtype="bfloat16"))


def test_auto_is_fp32_on_a_cpu_and_the_checkpoints_own_on_a_gpu(config):
    assert resolve_dtype("auto", config, CPU) is torch.float32
    assert resolve_dtype("auto", config, GPU) is torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", torch.float16), ("float", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_names_are_those_of_the_field(config, name, dtype):
    assert resolve_dtype(name, config, GPU) is dtype


def test_an_unknown_dtype_is_rejected(config):
    with pytest.raises(ConfigError, match="dtype is 'int8', supported are auto, float32"):
        resolve_dtype("int8", config, CPU)


def test_16_bit_dtypes_are_rejected_on_a_cpu(config):
    with pytest.raises(ConfigError, match=re.escape("dtype is 'bfloat16', supported on a CPU are float32 and auto")):
        resolve_dtype("bfloat16", config, CPU)
