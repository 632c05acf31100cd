"""Says what the packed weights of a start depend on, which names their file in the cache."""

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.model import fingerprint
from engine.model.packed_cache import PackedCache
from engine.parallel.group import ParallelGroup
from kernels.dtypes import dtype_name
from kernels.interface import KernelOps

_LOADING = Path(fingerprint.__file__).parent


def packed_cache(
    config: EngineConfig, model_dir: Path, ops: KernelOps, dtype: torch.dtype, group: ParallelGroup
) -> PackedCache | None:
    """Returns the cache of --packed-cache, which only a CPU has; None: there is none, or weights are random.

    Weights depend on the checkpoint, their number format, the rank, the sources that read and pack them, and on whether
    the CPU multiplies in bfloat16.
    """
    if config.packed_cache is None or config.load_format == "dummy":
        return None
    # with them numba, which a machine with a GPU may lack
    from kernels.cpu.cpu_features import cpu_features
    from kernels.cpu.kernel_cache import digest_of, kernel_sources

    sources = digest_of([*kernel_sources(), *_LOADING.rglob("*.py")], ("torch",))
    types = (config.quantization, config.dtype, dtype_name(dtype))  # bfloat16, but not auto, has products in bf16
    place = (group.rank, group.size, group.stage, group.num_stages)
    form = (ops.name, *types, *place, str(cpu_features().bf16), sources)
    return PackedCache(
        config.packed_cache,
        config.packed_cache_bytes,
        lambda: f"{fingerprint.weights_identity(model_dir)} {form}",
    )
