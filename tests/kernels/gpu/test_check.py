"""The check of kernels at start passes on a GPU, or under the interpreter."""

from dataclasses import replace

import pytest
import torch

from kernels.check import find_mismatches, kernel_cases
from kernels.families import reference_ops
from kernels.gpu.ops import GpuOps
from tests.support.kernels.model_forms import SMALL

BF16 = torch.bfloat16
FORMS = replace(SMALL, dtype=BF16, kv_dtype=BF16)


@pytest.mark.slow
def test_kernels_pass(device, target):
    ops = GpuOps(device, target, num_processors=132)
    assert not find_mismatches(ops, reference_ops(device), FORMS, kernel_cases(FORMS, device))


@pytest.mark.slow
def test_kernels_of_every_feature_pass(device, target, float8):
    forms = replace(FORMS, kv_dtype=float8, weights_8_bit="fp8", has_bias=True, has_head_norms=True, block_size=32)
    forms = replace(forms, sliding_windows=(50, None))
    ops = GpuOps(device, target, num_processors=132, quantize_weights=True, quantize_inputs=True)
    assert not find_mismatches(ops, reference_ops(device), forms, kernel_cases(forms, device))
