"""Sets the threads of an engine on a CPU, and chooses its kernels by the instructions of its processor."""

import logging

from engine.config import EngineConfig
from engine.errors import ConfigError
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.cpu_levels import use_compiled_level
from kernels.cpu.threads import set_num_threads

_log = logging.getLogger(__name__)


def set_threads(num_threads: int) -> None:
    """Sets the number of CPU threads of PyTorch and the kernels, and for which CPU these are before they are imported.

    Raises: ConfigError: the machine has fewer threads.
    """
    try:
        set_num_threads(num_threads)
    except ValueError as error:
        raise ConfigError(f"--threads: {error}") from error
    _log.info("Using %d CPU threads", num_threads)
    if (level := use_compiled_level()) is not None:
        _log.info("Using the CPU kernels that this image has compiled for %s", level)
    if not cpu_features().avx512:
        _log.warning("This CPU has no AVX-512: kernels use its narrower vectors, at a fraction of the speed")


def multiplies_in_bf16(config: EngineConfig) -> bool:
    """Tells whether linear layers round their inputs to bf16, and logs it: if a flag asks for it and the CPU can."""
    if config.dtype != "bfloat16" or config.quantization is not None:
        return False
    if cpu_features().bf16:
        _log.info(
            "Linear layers multiply in bfloat16 (--dtype bfloat16, AVX512-BF16), attention in float32; --dtype auto "
            "rounds nothing"
        )
        return True
    _log.warning(
        "This CPU has no AVX512-BF16: --dtype bfloat16 saves memory, its weights are multiplied in float32, which "
        "rounds nothing more"
    )
    return False
