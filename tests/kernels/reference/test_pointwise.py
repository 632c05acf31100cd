"""The small reference operations, against PyTorch's own or against arithmetic by hand."""

import math

import torch

from kernels.reference.rms_norm import add_rms_norm, rms_norm
from kernels.reference.rotary_embedding import rotary_embedding
from kernels.reference.silu_and_mul import silu_and_mul
from kernels.reference.store_kv_cache import store_kv_cache
from kernels.testing import assert_close


def test_rms_norm_equals_torch():
    x, weight = torch.randn(7, 33), torch.randn(33)
    assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (33,), weight, 1e-5))


def test_add_rms_norm_returns_the_sum_and_its_norm():
    x, residual, weight = torch.randn(7, 33), torch.randn(7, 33), torch.randn(33)
    total = x + residual
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(new_residual, total)
    assert_close(normed, rms_norm(total, weight, 1e-5))


def test_rotary_embedding_turns_pairs_by_position_times_frequency():
    frequencies = torch.tensor([1.0, 0.1])
    angles = torch.outer(torch.arange(5.0), frequencies)
    q, k = torch.randn(2, 3, 4), torch.randn(2, 1, 4)
    before = q.clone()
    rotary_embedding(q, k, torch.tensor([3, 0]), angles.cos(), angles.sin())
    for pair, frequency in enumerate(frequencies.tolist()):
        turned = torch.view_as_complex(torch.stack((before[0, :, pair], before[0, :, pair + 2]), -1)) * complex(
            math.cos(3 * frequency), math.sin(3 * frequency)
        )
        assert_close(q[0, :, pair], turned.real)
        assert_close(q[0, :, pair + 2], turned.imag)
    assert_close(q[1], before[1])  # position 0 is not turned


def test_silu_and_mul_gates_the_second_half():
    gate_up = torch.randn(5, 14)
    assert_close(silu_and_mul(gate_up), torch.nn.functional.silu(gate_up[:, :7]) * gate_up[:, 7:])


def test_store_kv_cache_writes_only_the_slots_named():
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    k_cache, v_cache = torch.full((2, 4, 2, 4), torch.nan), torch.full((2, 4, 2, 4), torch.nan)
    store_kv_cache(k, v, k_cache, v_cache, torch.tensor([7, 0, 2]))
    for cache, rows in ((k_cache.flatten(0, 1), k), (v_cache.flatten(0, 1), v)):
        assert torch.equal(cache[[7, 0, 2]], rows)
        assert cache[[1, 3, 4, 5, 6]].isnan().all()
