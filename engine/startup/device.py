"""Chooses the device of the engine and checks which kernels and number formats it supports."""

import torch

from engine.config import EngineConfig
from engine.core.drafts import DraftLimits
from engine.errors import ConfigError
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.int_weights import IntWeights
from engine.model.linear import Kept
from engine.model.mxfp4 import Mxfp4Weights
from engine.startup.gpu import has_gpu
from engine.startup.machine import usable_cores

_EIGHT_BITS = {"cpu": "int8", "cuda": "fp8"}


def kept_weights(config: EngineConfig, device_type: str) -> Kept:
    """Returns the kinds of quantised weights of a checkpoint that the kernels of a device multiply as they are."""
    if config.uses_torch_kernels(device_type):
        return ()
    return {
        "cpu": (IntWeights, GgufWeights, Mxfp4Weights, Fp4Weights),
        "cuda": (Fp8Weights, IntWeights, GgufWeights, Mxfp4Weights, Fp4Weights),
    }[device_type]


def choose_device(config: EngineConfig) -> torch.device:
    """Returns the device of rank 0: a GPU if requested, or if available with --device auto."""
    if config.device == "cuda" or (
        config.device == "auto" and has_gpu(needs_kernels=not config.uses_torch_kernels("cuda"))
    ):
        return torch.device("cuda", 0)
    return torch.device("cpu")


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Checks that the device has the requested kernels, and that these support the requested number formats.

    Raises: ConfigError: a flag is unsupported; names a supported value.
    """
    if config.kernels == "triton" and device.type == "cpu":
        raise ConfigError("--kernels triton needs a GPU: use auto or torch, or --device cuda")
    served = _EIGHT_BITS[device.type]
    if config.attention_backend != "auto" and (device.type == "cpu" or config.kernels == "torch"):
        raise ConfigError(
            f"--attention-backend {config.attention_backend} needs the Triton kernels of a GPU: omit it"
            f"{', or use --device cuda' if device.type == 'cpu' else ' or --kernels torch'}"
        )
    if config.kv_cache_dtype == "bfloat16" and device.type == "cuda":
        raise ConfigError(
            "--kv-cache-dtype bfloat16 is a choice on a CPU only: on a GPU the cache has the dtype of activations "
            "(--dtype) or fp8"
        )
    for flag, value in (("--quantization", config.quantization), ("--kv-cache-dtype", config.kv_cache_dtype)):
        if value not in (None, "auto", "bfloat16", served):
            where = "a CPU" if device.type == "cpu" else "a GPU"
            raise ConfigError(f"{flag} {value} is not supported on {where}: use {served}, or another --device")
    if config.packed_cache is not None and device.type == "cuda":
        raise ConfigError("--packed-cache keeps the weights of a CPU: omit it, or use --device cpu")
    if config.batch_invariant and device.type == "cuda":
        _check_batch_invariant_gpu(config)
    if config.pipeline_parallel_size > 1:
        _check_pipeline(config)
    if (limits := config.drafts) is not None:
        _check_drafts(config, limits, config.step_limits(device.type).max_num_seqs)
    if config.uses_torch_kernels(device.type):
        _check_torch_kernels(config)


def _check_drafts(config: EngineConfig, limits: DraftLimits, max_num_seqs: int) -> None:
    num_stages, flag = config.pipeline_parallel_size, "--speculative-config"
    if num_stages > 1:
        raise ConfigError(
            f"{flag} is not supported with --pipeline-parallel-size {num_stages}, where a step begins before the "
            "tokens of the last one are known: omit one of the two"
        )
    if config.scheduling_policy == "slo":
        raise ConfigError(
            f"{flag} is not supported with --scheduling-policy slo, which plans one token per request and step: omit "
            "one of the two"
        )
    if config.async_scheduling:
        raise ConfigError(
            f"{flag} is not supported with --async-scheduling: a draft follows the last token, which must be known "
            "when a step is planned; omit one of the two"
        )
    if limits.num_speculative_tokens >= max_num_seqs:
        raise ConfigError(
            f"{flag}: num_speculative_tokens {limits.num_speculative_tokens} must be less than --max-num-seqs "
            f"{max_num_seqs}: a step draws at most as many tokens; lower the first or raise the second"
        )


def _check_pipeline(config: EngineConfig) -> None:
    num_stages = config.pipeline_parallel_size
    asked = {
        "--scheduling-policy slo": config.scheduling_policy == "slo",
        "--lora": bool(config.lora),
        "--enable-lora": config.enable_lora,
        "--async-scheduling": config.async_scheduling is not None,
    }
    for flag, is_asked in asked.items():
        if is_asked:
            raise ConfigError(
                f"{flag} is not supported with --pipeline-parallel-size {num_stages}: omit one of the two"
            )


def _check_batch_invariant_gpu(config: EngineConfig) -> None:
    if config.other_attention is not None:
        raise ConfigError(
            f"--attention-backend {config.other_attention} is not supported with --batch-invariant, which has its own "
            "order of summation: omit one of the two"
        )
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} is not supported with --batch-invariant on GPUs, "
            "where the order of summation among ranks depends on the batch: omit one of the two"
        )


def _check_torch_kernels(config: EngineConfig) -> None:
    asked = {
        f"--quantization {config.quantization}": config.quantization is not None,
        f"--kv-cache-dtype {config.kv_cache_dtype}": config.kv_cache_dtype != "auto",
        "--batch-invariant": config.batch_invariant,
    }
    reason = "--kernels torch"
    if config.kernels != "torch":
        reason = (
            f"--tensor-parallel-size {config.tensor_parallel_size} on a CPU, where ranks use plain PyTorch operations"
        )
    for flag, is_asked in asked.items():
        if is_asked:
            raise ConfigError(f"{flag} is not supported with {reason}: omit one of the two")


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the KV cache. For "fp8" the GPU later selects its own variant.

    Args:
        config: checked configuration.
        dtype: dtype of activations, float32 on a CPU.
    """
    match config.kv_cache_dtype:
        case "auto" if config.dtype == "bfloat16" and not config.uses_torch_kernels("cpu"):
            return torch.bfloat16
        case "auto":
            return dtype
        case name:
            return {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[name]


def set_threads(config: EngineConfig, device: torch.device) -> int:
    """Sets the number of CPU threads of this process and returns it.

    Without --threads they are this rank's share of the usable cores, or fewer if NUMBA_NUM_THREADS says so.

    Raises: ConfigError: the machine has fewer.
    """
    threads = config.threads or max(1, usable_cores() // config.layout.ranks_per_node)
    if device.type == "cpu":
        from engine.startup import cpu_threads  # and with it numba, which a machine with a GPU may lack
        from kernels.cpu.threads import max_num_threads

        if config.threads is None:
            threads = min(threads, max_num_threads())
        cpu_threads.set_threads(threads)
    return threads
