"""Sets the threads and the kernels of an engine on a CPU, and warns about instructions that its processor lacks."""

import logging

from engine.errors import ConfigError
from kernels.cpu.cpu_features import cpu_features
from kernels.cpu.cpu_levels import use_compiled_level
from kernels.cpu.threads import set_num_threads

_log = logging.getLogger(__name__)


def set_threads(num_threads: int, quantization: str | None) -> None:
    """Sets the number of CPU threads, and for which CPU the kernels are, before they are imported.

    Args:
        num_threads: threads of PyTorch and of the kernels.
        quantization: of the weights, as in `EngineConfig`.
    Raises: ConfigError: the machine has fewer threads.
    """
    try:
        set_num_threads(num_threads)
    except ValueError as error:
        raise ConfigError(f"--threads: {error}") from error
    _log.info("Using %d CPU threads", num_threads)
    if (level := use_compiled_level()) is not None:
        _log.info("Using the CPU kernels that this image has compiled for %s", level)
    features = cpu_features()
    if not features.avx512:
        _log.warning("This CPU has no AVX-512: kernels use its narrower vectors, at a fraction of the speed")
    if quantization == "int8" and not features.vnni:
        _log.warning(
            "This CPU has no AVX-512 VNNI: --quantization int8 saves memory, its weights are multiplied in float32"
        )
