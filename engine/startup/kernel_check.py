"""Checks at start that every kernel in use computes what the reference computes, before the model is loaded."""

import logging
from collections.abc import Callable, Iterable, Sequence

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.config import ModelConfig
from engine.model.fp4 import Fp4Weights
from engine.model.fp8 import Fp8Weights
from engine.model.gguf_weights import GgufWeights
from engine.model.int_weights import IntWeights
from engine.model.linear import Kept
from engine.model.mxfp4 import Mxfp4Weights
from engine.startup.progress import StartupProgress
from engine.startup.served_model import ServedModel
from kernels.check import (
    KernelCase,
    Mismatch,
    find_mismatches,
    kernel_cases,
    run_cases,
)
from kernels.delta_heads import DeltaHeads
from kernels.families import reference_ops
from kernels.gates import Gate
from kernels.interface import KernelOps, Routing
from kernels.model_forms import ExpertForms, ModelForms, WeightsForm

_GROUPS: dict[int, WeightsForm] = {4: "int4 groups", 5: "int5 groups", 6: "int6 groups", 8: "int8 groups"}
_INT8_BY_GROUPS: dict[int, WeightsForm] = {
    4: "int8 by int4 groups", 5: "int8 by int5 groups", 6: "int8 by int6 groups", 8: "int8 by int8 groups",
}  # fmt: skip
"""Forms by the bits of an integer."""

_log = logging.getLogger(__name__)


def model_forms(
    config: EngineConfig,
    model: ServedModel,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    kept: Kept,
    weights_dtype: torch.dtype | None = None,
    multiplies_in_bf16: bool = False,
) -> ModelForms:
    """Returns what decides in which forms a rank uses the kernels.

    Args:
        config: the engine's configuration.
        model: configuration of the rank's shard; of transformers, only attention, linear layers and experts count.
        dtype, kv_dtype: dtypes of activations and of the cache.
        kept: kinds of quantised weights of a checkpoint that stay as they are; others are converted.
        weights_dtype: dtype of stored weights that are not in 8 bits; None: that of activations.
        multiplies_in_bf16: see `ModelForms`.
    """
    weights: WeightsForm | None = config.quantization
    stored = model.quantized
    if isinstance(stored, Fp8Weights) and isinstance(stored, kept):
        weights = "fp8 blocks" if stored.has_blocks else "fp8 checkpoint"
    if isinstance(stored, IntWeights | GgufWeights) and isinstance(stored, kept):
        if weights is None:
            weights = _GROUPS[stored.num_bits]
        elif weights == "int8":
            weights = _INT8_BY_GROUPS[stored.num_bits]
    if isinstance(stored, Fp4Weights) and isinstance(stored, kept) and weights != "int8":
        weights = "mxfp4 groups" if stored.layout == "mxfp4" else "nvfp4 groups"
    if isinstance(model, ModelConfig):
        eps, has_bias, has_head_norms = model.rms_norm_eps, model.traits.qkv_bias, model.traits.qk_norm
        sliding_windows = model.traits.sliding_windows
        soft_caps: tuple[float | None, ...] = (model.traits.attention_soft_cap,)
        logit_soft_cap = model.traits.logit_soft_cap
        gate: Gate = model.gate
    else:
        gate = "silu_and_mul"
        eps, has_bias, has_head_norms, sliding_windows = 1e-6, False, False, model.sliding_windows
        soft_caps, logit_soft_cap = model.soft_caps, None
    widest = model.shape.widest_layer
    return ModelForms(
        dtype=dtype,
        kv_dtype=kv_dtype,
        weights_dtype=weights_dtype or dtype,
        weights_form=weights,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=widest.num_heads,
        num_kv_heads=widest.num_kv_heads,
        head_dim=widest.head_dim,
        value_dim=widest.value_dim,
        vocab_size=model.shape.vocab_size,
        eps=eps,
        has_bias=has_bias,
        has_head_norms=has_head_norms,
        gate=gate,
        sliding_windows=tuple(dict.fromkeys(sliding_windows)),
        attention_soft_caps=soft_caps,
        logit_soft_cap=logit_soft_cap,
        block_size=config.block_size,
        experts=_expert_forms(config, model, kept),
        has_sinks=isinstance(model, ModelConfig) and model.traits.has_sinks,
        has_projection_norms=isinstance(model, ModelConfig) and model.traits.projection_norms,
        multiplies_in_bf16=multiplies_in_bf16,
        delta_heads=_delta_heads(model),
        has_attention_gate=isinstance(model, ModelConfig) and model.traits.attention_gate,
        has_adapters=bool(config.lora) or config.enable_lora,
    )


def _delta_heads(model: ServedModel) -> DeltaHeads | None:
    """Returns the sizes of the first layer of the gated delta rule; other layers have the same."""
    rules = model.traits.delta_rules if isinstance(model, ModelConfig) else ()
    return next((heads for heads in rules if heads is not None), None)


def _expert_forms(config: EngineConfig, model: ServedModel, kept: Kept) -> ExpertForms | None:
    """Returns the forms of the first mixture of a model; other layers have the same. None: it has no experts."""
    stored = model.quantized
    is_microscaled = (
        isinstance(stored, Mxfp4Weights | GgufWeights | Fp4Weights)
        and isinstance(stored, kept)
        and config.quantization is None
        and stored.has_microscaled_experts
    )
    if not isinstance(model, ModelConfig):
        shape = next(iter(model.experts.values()), None)
        if shape is None:
            return None
        routing = Routing(shape.top_k, normalizes=False, gate=shape.gate)
        return ExpertForms(shape.num_experts, shape.inner, routing, is_microscaled=is_microscaled, has_router=False)
    mixture = next((mixture for mixture in model.traits.mixtures if mixture is not None), None)
    if mixture is None:
        return None
    routing = Routing(mixture.top_k, mixture.normalizes, mixture.clamped_gate or model.gate)
    return ExpertForms(
        mixture.num_experts,
        mixture.inner_size,
        routing,
        mixture.has_bias,
        is_microscaled,
        has_shared=mixture.shared_size is not None,
    )


def check_cpu_kernels(config: EngineConfig, ops: KernelOps, forms: ModelForms, startup: StartupProgress) -> None:
    """Checks the kernels of a CPU, unless they have passed in these forms before.

    Raises: ConfigError: a result is wrong and `--kernel-check` is "fail".
    """
    from kernels.cpu.checked_forms import is_checked, remember_checked

    if config.kernel_check == "off" or is_checked(repr(forms)):
        return
    if _check(config, ops, forms, torch.device("cpu"), startup):
        remember_checked(repr(forms))


def check_gpu_kernels(
    config: EngineConfig, ops: KernelOps, forms: ModelForms, device: torch.device, startup: StartupProgress
) -> None:
    """Compiles the kernels of a GPU in parallel, then checks them; at every start, as the GPU may have become faulty.

    Raises: ConfigError: a result is wrong and `--kernel-check` is "fail".
    """
    from kernels.gpu.launch import compile_only, load_kernels

    def compile_cases(cases: Sequence[KernelCase]) -> None:
        with compile_only(progress=startup.count) as kernels:
            run_cases(ops, forms, cases)
        load_kernels(kernels)

    if config.kernel_check != "off":
        _check(config, ops, forms, device, startup, prepare=compile_cases)


def _check(
    config: EngineConfig,
    ops: KernelOps,
    forms: ModelForms,
    device: torch.device,
    startup: StartupProgress,
    prepare: Callable[[Sequence[KernelCase]], None] = lambda _: None,
) -> bool:
    """Returns whether all kernels passed."""
    startup.begin("kernel check", "checking kernels against the reference")
    cases = kernel_cases(forms, device)
    prepare(cases)
    mismatches = find_mismatches(ops, reference_ops(device), forms, cases)
    _log.info("Checking %d kernels against the reference took %.2f seconds", len(cases), startup.phase_s())
    if not mismatches:
        return True
    if config.kernel_check == "warn":
        for mismatch in mismatches:
            _log.warning("Kernel check: %s; answers may be wrong, %s", mismatch.reason, _remedy(mismatches, ops))
        return False
    more = f", and {len(mismatches) - 1} more kernels" if len(mismatches) > 1 else ""
    raise ConfigError(
        f"kernel check: {mismatches[0].reason}{more}: {_remedy(mismatches, ops)}, or serve regardless with "
        "--kernel-check warn"
    )


def _remedy(mismatches: Iterable[Mismatch], ops: KernelOps) -> str:
    is_attention = ops.name == "triton" and all(mismatch.kernel == "paged_attention" for mismatch in mismatches)
    return "use --attention-backend torch or --kernels torch" if is_attention else "use --kernels torch"
