"""The small CPU operations against the reference, on contiguous tensors and on slices of a fused projection."""

import math

import numpy as np
import pytest
import torch

from kernels.cpu.jit import exp_nonpositive
from kernels.cpu.rms_norm import add_rms_norm, rms_norm
from kernels.cpu.rotary_embedding import rotary_embedding
from kernels.cpu.silu_and_mul import silu_and_mul
from kernels.cpu.store_kv_cache import store_kv_cache
from kernels.ops import reference_ops
from kernels.testing import assert_close

REFERENCE = reference_ops()
SIZES = [1, 5, 129]


def fused(num_tokens, *num_heads, head_dim):
    """Q, K, V... as slices of one projection."""
    whole = torch.randn(num_tokens, sum(num_heads), head_dim)
    return torch.split(whole, num_heads, dim=1)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("n", [1, 33, 256])
def test_rms_norm_equals_reference(num_tokens, n):
    x, weight = torch.randn(num_tokens, n), torch.randn(n)
    assert_close(rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    assert_close(rms_norm(x[0], weight, 1e-6), REFERENCE.rms_norm(x[0], weight, 1e-6))


@pytest.mark.parametrize("num_tokens", SIZES)
def test_rms_norm_of_heads_equals_reference(num_tokens):
    q, k, _ = fused(num_tokens, 6, 2, 2, head_dim=32)
    weight = torch.randn(32)
    for x in (q, k):
        assert_close(rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("num_tokens", SIZES)
def test_add_rms_norm_equals_reference(num_tokens):
    x, residual, weight = torch.randn(num_tokens, 96), torch.randn(num_tokens, 96), torch.randn(96)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    for actual, wanted in zip(add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rotary_embedding_equals_reference(num_tokens, head_dim):
    angles = torch.outer(torch.arange(500.0), 10000.0 ** -torch.arange(0, 1, 2 / head_dim))
    positions = torch.randint(0, 500, (num_tokens,))
    q, k, v = fused(num_tokens, 6, 2, 2, head_dim=head_dim)
    untouched = v.clone()
    expected_q, expected_k = q.clone(), k.clone()
    REFERENCE.rotary_embedding(expected_q, expected_k, positions, angles.cos(), angles.sin())
    rotary_embedding(q, k, positions, angles.cos(), angles.sin())
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(v, untouched)


@pytest.mark.parametrize("num_tokens", SIZES)
def test_store_kv_cache_equals_reference(num_tokens):
    _, k, v = fused(num_tokens, 6, 2, 2, head_dim=32)
    slots = torch.randperm(20 * 16)[:num_tokens]
    caches = [torch.full((20, 16, 2, 32), torch.nan) for _ in range(4)]
    REFERENCE.store_kv_cache(k, v, caches[0], caches[1], slots)
    store_kv_cache(k, v, caches[2], caches[3], slots)
    for expected, actual in ((caches[0], caches[2]), (caches[1], caches[3])):
        assert torch.equal(expected.nan_to_num(9.0), actual.nan_to_num(9.0))


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_silu_and_mul_equals_reference(num_tokens, scale):
    gate_up = torch.randn(num_tokens, 2 * 88) * scale
    actual, expected = silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)
    assert_close(actual / scale, expected / scale)


def test_nan_goes_through_every_operation():
    x = torch.randn(3, 8)
    x[1, 5] = torch.nan
    for out in (rms_norm(x, torch.ones(8), 1e-6), add_rms_norm(x, torch.zeros(3, 8), torch.ones(8), 1e-6)[0]):
        assert out[1].isnan().all()
        assert not out[[0, 2]].isnan().any()
    assert silu_and_mul(x)[1, 1].isnan()


def test_exp_nonpositive_is_exact_to_an_ulp_and_keeps_nan():
    x = np.concatenate((np.linspace(-87, 0, 20001), [-1e-30, -0.0])).astype(np.float32)
    actual = np.array([exp_nonpositive(value) for value in x], np.float64)
    np.testing.assert_allclose(actual, np.exp(x.astype(np.float64)), rtol=1.2e-7)
    assert exp_nonpositive(np.float32(-88)) == 0
    assert exp_nonpositive(np.float32(-3e38)) == 0
    assert exp_nonpositive(np.float32(-math.inf)) == 0
    assert math.isnan(exp_nonpositive(np.float32(math.nan)))


def test_errors_name_what_is_wrong():
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 on cpu, CPU operations take float32"):
        rms_norm(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match=r"x has shape \[1, 4\], residual \[2, 4\]"):
        add_rms_norm(torch.ones(1, 4), torch.ones(2, 4), torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="head_dim is 8, the tables have 3 pairs"):
        rotary_embedding(
            torch.ones(1, 1, 8), torch.ones(1, 1, 8), torch.tensor([0]), torch.ones(4, 3), torch.ones(4, 3)
        )
    with pytest.raises(ValueError, match=r"rows of shape \[4\] with strides \(2,\) are not contiguous"):
        rms_norm(torch.ones(3, 8)[:, ::2], torch.ones(4), 1e-6)
    rows, cache = torch.ones(1, 2, 8), torch.ones(1, 16, 2, 4)
    with pytest.raises(ValueError, match=r"k \[1, 2, 8\] and v \[1, 2, 8\] do not fit caches \[1, 16, 2, 4\]"):
        store_kv_cache(rows, rows, cache, cache, torch.tensor([0]))
