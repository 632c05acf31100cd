"""The check of kernels at start passes on a GPU, or under the interpreter."""

from dataclasses import replace

import pytest
import torch

from kernels.check import find_mismatches, kernel_cases
from kernels.families import reference_ops
from kernels.gpu.ops import GpuOps
from kernels.gpu.targets import TARGETS, target_of
from kernels.torch_attention import torch_attention
from tests.support.kernels.model_forms import SMALL

BF16 = torch.bfloat16
FORMS = replace(SMALL, dtype=BF16, kv_dtype=BF16, weights_dtype=BF16)


@pytest.mark.slow
def test_kernels_pass(device, target):
    ops = GpuOps(device, target, num_processors=132)
    assert not find_mismatches(ops, reference_ops(device), FORMS, kernel_cases(FORMS, device))


@pytest.mark.parametrize("attention", [None, torch_attention], ids=["triton", "torch"])
@pytest.mark.parametrize("is_float8", [False, True], ids=["bf16", "fp8"])
def test_attention_over_latents_passes_and_over_other_values_does_not(device, target, float8, attention, is_float8):
    forms = replace(FORMS, num_heads=20, num_kv_heads=1, head_dim=48, value_dim=32)
    forms = replace(forms, kv_dtype=float8 if is_float8 else BF16)
    ops = GpuOps(device, target, num_processors=132, attention=attention)
    cases = [case for case in kernel_cases(forms, device) if case.kernel in ("rotate_and_store", "paged_attention")]
    assert len(cases) == 3
    assert all("latents of 32" in case.form for case in cases)
    assert not find_mismatches(ops, reference_ops(device), forms, cases)
    right = ops.paged_attention
    ops.paged_attention = lambda *args, **options: right(*args, **options).flip(1)
    assert len(find_mismatches(ops, reference_ops(device), forms, cases)) == 2


@pytest.mark.slow
def test_kernels_of_every_feature_pass(device, target, float8):
    forms = replace(FORMS, kv_dtype=float8, weights_form="fp8", has_bias=True, has_head_norms=True, block_size=32)
    forms = replace(forms, sliding_windows=(50, None), attention_soft_caps=(2.0,), logit_soft_cap=30.0)
    ops = GpuOps(device, target, num_processors=132, quantize_weights=True, quantize_inputs=True)
    assert not find_mismatches(ops, reference_ops(device), forms, kernel_cases(forms, device))


@pytest.mark.parametrize("name", ["sm_90", "sm_80"])
def test_products_with_scales_per_block_pass_and_wrong_ones_do_not(device, name):
    """On GPUs with and without 8-bit floats; scales of other blocks are an error of more than half."""
    target = TARGETS[name] if device.type == "cpu" else target_of(device)
    forms = replace(SMALL, weights_form="fp8 blocks", hidden_size=256, intermediate_size=384)
    has_fp8 = target.fp8_dtype is not None
    ops = GpuOps(device, target, num_processors=132, quantize_inputs=has_fp8, input_group_size=128)
    cases = [case for case in kernel_cases(forms, device) if case.kernel.startswith("linear after")]
    assert not find_mismatches(ops, reference_ops(device), forms, cases)
    right = ops.pack_quantized

    def swapped(values, scales, bias, dtype):
        return right(values, scales.flip(0, 1), bias, dtype)

    ops.pack_quantized = swapped
    assert len(find_mismatches(ops, reference_ops(device), forms, cases)) == 2


@pytest.mark.parametrize("form", ["int4 groups", "int6 groups", "int8 groups", "nvfp4 groups", "mxfp4 groups"])
def test_products_of_integers_pass_and_wrong_ones_do_not(device, target, form):
    forms = replace(SMALL, weights_form=form, hidden_size=64, intermediate_size=96)
    ops = GpuOps(device, target, num_processors=132)
    cases = [case for case in kernel_cases(forms, device) if case.kernel.startswith("linear after")]
    assert not find_mismatches(ops, reference_ops(device), forms, cases)
    right = ops.pack_grouped
    ops.pack_grouped = lambda weights, *of: right(weights._replace(scales=weights.scales.flip(1)), *of)
    assert len(find_mismatches(ops, reference_ops(device), forms, cases)) == 2
