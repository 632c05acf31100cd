"""Which device an engine computes on, and what can be asked of it there."""

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.startup.gpu import has_gpu

_EIGHT_BITS = {"cpu": "int8", "cuda": "fp8"}


def choose_device(config: EngineConfig) -> torch.device:
    """Of rank 0: its GPU if one was asked for, or is there and a CPU was not asked for."""
    if config.device == "cuda" or (config.device == "auto" and has_gpu()):
        return torch.device("cuda", 0)
    return torch.device("cpu")


def check_numbers(config: EngineConfig, device: torch.device) -> None:
    """Compares the number formats asked for with those that the device's kernels have.

    Raises: ConfigError: they do not have one; says which they have.
    """
    served = _EIGHT_BITS[device.type]
    for flag, value in (("--quantization", config.quantization), ("--kv-cache-dtype", config.kv_cache_dtype)):
        if value not in (None, "auto", served):
            where = "a CPU" if device.type == "cpu" else "a GPU"
            raise ConfigError(f"{flag} {value}: on {where} it is {served}; use that, or another --device")
    if config.batch_invariant and device.type != "cpu":
        raise ConfigError(
            "--batch-invariant: a GPU adds up its matrix products in an order that depends on the batch; leave it out, "
            "or use --device cpu"
        )


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are stored in, as far as it does not depend on the GPU: there "fp8" is the GPU's own form.

    Args:
        config: has been checked.
        dtype: of activations.
    """
    return {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[config.kv_cache_dtype]
