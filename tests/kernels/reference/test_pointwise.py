"""Reference operations against PyTorch's or explicit arithmetic."""

import math

import pytest
import torch

from kernels.families import reference_ops
from kernels.reference.gate import gate_and_mul
from kernels.reference.rms_norm import add_rms_norm, rms_norm
from tests.support.kernels.batches import assert_close, assert_same_bits, poison_cache, read_cache

OPS = reference_ops()


def test_rms_norm_equals_torch():
    x, weight = torch.randn(7, 33), torch.randn(33)
    assert_close(rms_norm(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (33,), weight, 1e-5))


def test_add_rms_norm_returns_the_sum_and_its_norm():
    x, residual, weight = torch.randn(7, 33), torch.randn(7, 33), torch.randn(33)
    total = x + residual
    normed, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert_close(new_residual, total)
    assert_close(normed, rms_norm(total, weight, 1e-5))


def test_rotate_and_store_rotates_pairs_by_position_times_frequency():
    """Queries and keys are rotated, values are not."""
    frequencies = torch.tensor([1.0, 0.1])
    angles = torch.outer(torch.arange(5.0), frequencies)
    heads, cache = torch.randn(2, 5, 4), OPS.make_kv_cache(2, 4, 1, 4, torch.float32)
    slots = torch.tensor([6, 1])
    q = OPS.rotate_and_store(heads.flatten(1), torch.tensor([3, 0]), angles.cos(), angles.sin(), cache, slots)
    k, v = read_cache(cache, slots)
    rotated = torch.cat((q, k), dim=1)
    for pair, frequency in enumerate(frequencies.tolist()):
        wanted = torch.view_as_complex(torch.stack((heads[0, :4, pair], heads[0, :4, pair + 2]), -1)) * complex(
            math.cos(3 * frequency), math.sin(3 * frequency)
        )
        assert_close(rotated[0, :, pair], wanted.real)
        assert_close(rotated[0, :, pair + 2], wanted.imag)
    assert_close(rotated[1], heads[1, :4])  # position 0 is not rotated
    assert_same_bits(v, heads[:, 4:])


def test_rotate_and_store_norms_heads_before_rotating():
    heads, norms = torch.randn(1, 4, 8), (torch.randn(8), torch.randn(8))
    cache, zero = OPS.make_kv_cache(1, 4, 1, 8, torch.float32), torch.tensor([0])
    angles = torch.rand(1, 4)
    table = angles.cos(), angles.sin()
    q = OPS.rotate_and_store(heads.flatten(1), zero, *table, cache, zero, head_norms=norms, eps=1e-5)
    k, v = read_cache(cache, zero)
    normed = torch.cat((rms_norm(heads[:, :2], norms[0], 1e-5), rms_norm(heads[:, 2:3], norms[1], 1e-5)), dim=1)
    plain = torch.cat((normed, heads[:, 3:]), dim=1).flatten(1)
    assert_close(q, OPS.rotate_and_store(plain, zero, *table, cache, zero))
    assert_close(k, read_cache(cache, zero)[0])
    assert_same_bits(v, heads[:, 3:])


def test_silu_and_mul_gates_the_second_half():
    gate_up = torch.randn(5, 14)
    assert_close(gate_and_mul(gate_up, "silu_and_mul"), torch.nn.functional.silu(gate_up[:, :7]) * gate_up[:, 7:])


def test_gelu_and_mul_is_the_tanh_approximation():
    gate_up = torch.linspace(-6, 6, 98).view(7, 14)
    gate, up = gate_up.double().chunk(2, dim=1)
    gelu = gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2
    assert_close(gate_and_mul(gate_up, "gelu_and_mul"), (gelu * up).float())


def test_rotate_and_store_writes_only_the_given_slots():
    cache = OPS.make_kv_cache(2, 4, 2, 4, torch.float32)
    poison_cache(cache)
    ones = torch.ones(1, 2)
    heads, slots = torch.randn(3, 5, 4), torch.tensor([7, 0, 2])
    OPS.rotate_and_store(heads.flatten(1), torch.zeros(3, dtype=torch.int64), ones, ones - 1, cache, slots)
    for part, wanted in zip(read_cache(cache, slots), (heads[:, 1:3], heads[:, 3:]), strict=True):
        assert_same_bits(part, wanted)
    for part in read_cache(cache, torch.tensor([1, 3, 4, 5, 6])):
        assert part.isnan().all()


def test_gather_rows_and_linear_equal_torch():
    table, weight, bias = torch.randn(6, 3), torch.randn(4, 3), torch.randn(4)
    rows = OPS.gather_rows(table, torch.tensor([5, 0, 5]))
    assert_same_bits(rows, torch.stack((table[5], table[0], table[5])))
    assert_close(OPS.linear(rows, OPS.pack_linear(weight, bias)), rows @ weight.T + bias)
    assert_close(OPS.linear(rows, OPS.pack_linear(weight, None)), rows @ weight.T)


def test_8_bit_weights_are_value_times_scale():
    values, x, bias = torch.randn(4, 3).to(torch.float8_e4m3fn), torch.randn(5, 3), torch.randn(4)
    for scales in (torch.tensor([0.5]), torch.rand(4), torch.rand(4, 1)):
        weight = values.float() * scales.reshape(-1, 1)
        packed = OPS.pack_quantized(values, scales, bias, torch.float32)
        assert_close(OPS.linear(x, packed), x @ weight.T + bias)


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 300), (300, 1), (1, 1), (2, 256), (129, 130)])
def test_8_bit_weights_have_a_scale_per_block(num_out, num_in):
    """Also those of one output, such as the gate of a shared expert, whose scales look like those of channels."""
    values, x = torch.randn(num_out, num_in).to(torch.float8_e4m3fn), torch.randn(5, num_in)
    scales = 0.5 + torch.rand(-(-num_out // 128), -(-num_in // 128))
    blocks = scales[torch.arange(num_out)[:, None] // 128, torch.arange(num_in) // 128]
    packed = OPS.pack_quantized(values, scales, None, torch.float32)
    assert_close(OPS.linear(x, packed), x @ (values.float() * blocks).T)
