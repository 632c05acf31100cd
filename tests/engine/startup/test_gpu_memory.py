"""Division of GPU memory, and errors if it is insufficient."""

import logging

import pytest

from engine.errors import ConfigError
from engine.startup.gpu_memory import GpuMemory, MemoryUse, kv_cache_bytes

GIB = 2**30
H200 = GpuMemory("an H200", 140 * GIB, 139 * GIB, 0.9)


def test_the_cache_gets_the_remaining_memory(caplog: pytest.LogCaptureFixture) -> None:
    use = MemoryUse(context_bytes=GIB, weights_bytes=15 * GIB, step_bytes=2 * GIB, graphs_bytes=1 * GIB)
    with caplog.at_level(logging.INFO):
        assert kv_cache_bytes(H200, use) == 126 * GIB - 19 * GIB
    for part in (
        "126.00 GiB of 140.00",
        "context 1.00",
        "weights 15.00",
        "step 2.00",
        "graphs 1.00",
        "cache 107.00",
    ):
        assert part in caplog.text


def test_when_nothing_is_left_the_missing_bytes_and_the_flags_are_named() -> None:
    use = MemoryUse(context_bytes=0, weights_bytes=125 * GIB, step_bytes=3 * GIB, graphs_bytes=GIB // 2)
    with pytest.raises(ConfigError, match=r"take 2\.50 GiB more than the 126\.00 GiB .* --max-num-batched-tokens"):
        kv_cache_bytes(H200, use)


def test_a_gpu_with_too_little_free_memory_is_rejected() -> None:
    H200.check()
    shared = GpuMemory("an H200", 140 * GIB, 68 * GIB, 0.9)
    with pytest.raises(
        ConfigError, match=r"126\.00 GiB of the 140\.00 .* 69\.50 GiB is free.* at most --gpu-memory-utilization 0\.49"
    ):
        shared.check()


def test_weights_that_do_not_fit_are_rejected_with_the_missing_bytes() -> None:
    H200.check_weights(125 * GIB)
    with pytest.raises(ConfigError, match=r"141\.00 GiB.* 15\.00 GiB too little\. .* --tensor-parallel-size"):
        H200.check_weights(141 * GIB)


def test_memory_used_before_loading_counts_as_this_process_up_to_a_bound() -> None:
    """The context and communication buffers of this process cannot be told from other processes."""
    assert H200.context_bytes == GIB
    assert GpuMemory("an H200", 140 * GIB, 70 * GIB, 0.5).context_bytes == 3 * GIB // 2
    GpuMemory("an idle GPU", 140 * GIB, 139 * GIB, 1.0).check()
