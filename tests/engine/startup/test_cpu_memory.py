"""The cache's size on a CPU."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.startup.build import build_engine
from engine.startup.progress import StartupProgress


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_cache_memory_bytes": 3 * 2**40}, r"--kv-cache-memory-bytes 3298534883328 is 3,072 GiB"),
        ({"num_gpu_blocks_override": 2**31 - 1}, r"--num-gpu-blocks-override 2147483647 is [\d,]+ GiB"),
    ],
)
def test_a_cache_larger_than_the_memory_is_rejected(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, int], words: str
) -> None:
    monkeypatch.setattr("engine.startup.cpu_memory.available_memory_bytes", lambda: 2**40)
    config = EngineConfig(model=str(model_dir), device="cpu", threads=1, **flags)
    with pytest.raises(ConfigError, match=rf"{words}, the weights leave 1,024 GiB of the memory that is free"):
        build_engine(config, StartupProgress())
