"""The cache's size on a CPU."""

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.startup.cpu_memory import kv_cache_bytes


def test_a_cache_larger_than_the_memory_is_rejected() -> None:
    config = EngineConfig(model="any", kv_cache_memory_bytes=3 * 2**30)
    words = r"--kv-cache-memory-bytes 3221225472 is 3 GiB, the weights leave 1\.5 GiB"
    with pytest.raises(ConfigError, match=words):
        kv_cache_bytes(config, None, torch.float32, config.step_limits("cpu"), 3 * 2**29)  # type: ignore[arg-type]
    assert kv_cache_bytes(config, None, torch.float32, config.step_limits("cpu"), 3 * 2**30) == 3 * 2**30  # type: ignore[arg-type]
