"""Row operations on CPUs against the reference; a row has the same bits among any others."""

import math

import numpy as np
import pytest
import torch

from kernels.cpu.jit import exp_nonpositive
from kernels.families import cpu_ops, reference_ops
from kernels.gates import ClampedGate
from tests.support.kernels.batches import assert_close, assert_same_bits

OPS, REFERENCE = cpu_ops(), reference_ops()
SIZES = [1, 5, 31, 32, 33, 129]  # with one thread, rows are divided into at most 16 items


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 33, 256])
def test_weights_of_two_bytes_are_widened(dtype, n):
    """The results of norms have the bits of the same weights in fp32."""
    rows, weight = torch.randn(33, n), torch.randn(n).to(dtype)
    assert_same_bits(OPS.rms_norm(rows, weight, 1e-6), OPS.rms_norm(rows, weight.float(), 1e-6))
    for actual, wanted in zip(
        OPS.add_rms_norm(rows, rows.clone(), weight, 1e-6),
        OPS.add_rms_norm(rows, rows.clone(), weight.float(), 1e-6),
        strict=True,
    ):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize(("first", "n"), [(0, 33), (33, 64), (97, 3), (0, 100)])
def test_columns_are_normed_in_place(num_tokens, first, n):
    x, weight = torch.randn(num_tokens, 100), torch.randn(n).to(torch.bfloat16)
    out, columns = x.clone(), slice(first, first + n)
    OPS.norm_columns(out, first, weight, 1e-6)
    assert_close(out[:, columns], REFERENCE.rms_norm(x[:, columns], weight, 1e-6))
    alone = x[-1:].clone()
    OPS.norm_columns(alone, first, weight, 1e-6)
    assert_same_bits(alone, out[-1:])
    out[:, columns] = x[:, columns]
    assert_same_bits(out, x)


@pytest.mark.parametrize("first", [-1, 41])
def test_columns_that_x_does_not_have_are_refused(first):
    with pytest.raises(ValueError, match=f"columns from {first} on by a weight of shape .60.: x has 100 columns"):
        OPS.norm_columns(torch.zeros(2, 100), first, torch.ones(60), 1e-6)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("n", [1, 33, 256])
def test_rms_norm_equals_reference(num_tokens, n):
    x, weight = torch.randn(num_tokens, n), torch.randn(n)
    untouched = x.clone()
    assert_close(OPS.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))
    assert_same_bits(x, untouched)


def test_rms_norm_uses_its_eps():
    x = torch.full((1, 4), 0.1)
    assert_close(OPS.rms_norm(x, torch.ones(4), 0.03), torch.full((1, 4), 0.5))
    assert_close(OPS.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-6), torch.zeros(1, 4))


@pytest.mark.parametrize("num_tokens", SIZES)
def test_add_rms_norm_equals_reference(num_tokens):
    x, residual, weight = torch.randn(num_tokens, 96), torch.randn(num_tokens, 96), torch.randn(96)
    expected = REFERENCE.add_rms_norm(x, residual, weight, 1e-6)
    for actual, wanted in zip(OPS.add_rms_norm(x, residual.clone(), weight, 1e-6), expected, strict=True):
        assert_close(actual, wanted)


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("gate", ["silu_and_mul", "gelu_and_mul"])
def test_gates_equal_reference(num_tokens, scale, gate):
    gate_up = torch.randn(num_tokens, 2 * 88) * scale
    actual, expected = (ops.gate_and_mul(gate_up, gate) for ops in (OPS, REFERENCE))
    assert_close(actual / scale, expected / scale)


def test_soft_cap_is_exact_from_tiny_values_to_infinity():
    """Cephes' polynomial and exp are within 2e-7, the steps of fp32 around them within 1e-7 each."""
    sizes = torch.cat((torch.logspace(-30, 3, 996), torch.tensor([0.0, 1e30, torch.inf, torch.nan])))
    x = torch.stack((sizes, -sizes, sizes * 0.7))
    expected = 30 * torch.tanh(x.double() / 30)
    torch.testing.assert_close(OPS.soft_cap(x, 30.0).double(), expected, rtol=5e-7, atol=0, equal_nan=True)


def test_gelu_of_large_values_is_zero_or_the_value():
    gate = torch.tensor([[-3e38, -1e14, -100.0, -0.0, 100.0, 1e14, 3e38]])
    gated = OPS.gate_and_mul(torch.cat((gate, torch.ones_like(gate)), dim=1), "gelu_and_mul")
    assert_close(gated, gate.clamp(min=0))


def _operations(x):
    weight = torch.linspace(-1, 1, x.shape[1])
    yield OPS.gather_rows(x, torch.arange(len(x)))
    yield OPS.rms_norm(x, weight, 1e-6)
    yield OPS.add_rms_norm(x, x + 1, weight, 1e-6)[0]
    for gate in ("silu_and_mul", "gelu_and_mul", ClampedGate(1.702, 7.0)):
        yield OPS.gate_and_mul(x, gate)


def test_a_row_has_the_same_bits_among_any_number_of_rows():
    x = torch.randn(129, 86)
    together = list(_operations(x))
    for start, stop in [(0, 1), (128, 129), (40, 72), (7, 40)]:
        for alone, whole in zip(_operations(x[start:stop].clone()), together, strict=True):
            assert_same_bits(alone, whole[start:stop])


@pytest.mark.parametrize("n", [8, 16])
def test_rows_have_the_same_bits_however_near_their_results_are(n):
    """A compiler may run another loop then. Where memory is allocated near the rows is luck: it is tried often."""
    rows, weight = torch.randn(5, n), torch.randn(n)
    far = torch.empty(4096)
    far[: 5 * n] = rows.flatten()
    wanted = OPS.rms_norm(far[: 5 * n].view(5, n), weight, 1e-6)
    others = []
    for attempt in range(1000):
        num_rows = 1 + attempt % 5
        memory = torch.empty(num_rows * n + 16 + attempt % 16)
        near = memory[attempt % 16 :][: num_rows * n].view(num_rows, n).copy_(rows[:num_rows])
        assert_same_bits(OPS.rms_norm(near, weight, 1e-6), wanted[:num_rows])
        others += [torch.empty(n * (attempt % 9) + 1)] if attempt % 7 == 0 else []


def test_nan_propagates_through_every_operation_within_its_row():
    x = torch.randn(3, 8)
    x[1, 5] = torch.nan
    _, normed, added, *gates = _operations(x)
    for out in (normed, added):
        assert out[1].isnan().all()
        assert not out[[0, 2]].isnan().any()
    for gated in gates:
        assert gated.isnan().tolist() == [[False] * 4, [False, True, False, False], [False] * 4]


def test_exp_nonpositive_is_exact_to_an_ulp_and_keeps_nan():
    x = np.concatenate((np.linspace(-87, 0, 20001), [-1e-30, -0.0])).astype(np.float32)
    actual = np.array([exp_nonpositive(value) for value in x], np.float64)
    np.testing.assert_allclose(actual, np.exp(x.astype(np.float64)), rtol=1.2e-7)
    assert exp_nonpositive(np.float32(-88)) == 0
    assert exp_nonpositive(np.float32(-3e38)) == 0
    assert exp_nonpositive(np.float32(-math.inf)) == 0
    assert math.isnan(exp_nonpositive(np.float32(math.nan)))


def test_errors_name_what_is_wrong():
    ones = torch.ones(4)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16 on cpu, CPU operations take float32"):
        OPS.rms_norm(torch.ones(1, 4, dtype=torch.bfloat16), ones, 1e-6)
    with pytest.raises(ValueError, match=r"weight has shape \[5\], rows of x have 4 values"):
        OPS.rms_norm(torch.ones(1, 4), torch.ones(5), 1e-6)
    with pytest.raises(ValueError, match=r"x has shape \[1, 4\], residual \[2, 4\]"):
        OPS.add_rms_norm(torch.ones(1, 4), torch.ones(2, 4), ones, 1e-6)
    with pytest.raises(ValueError, match=r"x of shape \[3, 4\] is not contiguous"):
        OPS.rms_norm(torch.ones(3, 8)[:, ::2], ones, 1e-6)
    with pytest.raises(ValueError, match=r"gate_up of shape \[2, 3, 4\] .*not of two dimensions"):
        OPS.gate_and_mul(torch.ones(2, 3, 4), "silu_and_mul")
    with pytest.raises(ValueError, match=r"table of shape \[3, 4\] is not contiguous"):
        OPS.gather_rows(torch.ones(3, 8)[:, :4], torch.tensor([0]))


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("n", [1, 33, 256])
def test_gate_columns_equals_reference(num_tokens, n):
    """The gate is columns of wider rows, which stay as they are."""
    x, wide = torch.randn(num_tokens, n), torch.randn(num_tokens, n + 7) * 10
    untouched, gate = wide.clone(), wide[:, 5 : 5 + n]
    expected = REFERENCE.gate_columns(x, gate)
    alone = OPS.gate_columns(x[-1:].clone(), gate[-1:])
    assert_close(OPS.gate_columns(x, gate), expected)
    assert_same_bits(x[-1:], alone)
    assert_same_bits(wide, untouched)


def test_a_gate_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"gate of shape \[2, 5\] and strides \(5, 1\), x has shape \[2, 6\]"):
        OPS.gate_columns(torch.zeros(2, 6), torch.zeros(2, 5))


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("n", [1, 33, 256])
def test_add_shared_equals_reference(num_tokens, n):
    mixed, shared, x = torch.randn(3, num_tokens, n).unbind()
    gate = torch.randn(n) * n**-0.5
    expected = REFERENCE.add_shared(mixed, shared, x, gate)
    alone = OPS.add_shared(mixed[-1:].clone(), shared[-1:], x[-1:], gate)
    operands = shared.clone(), x.clone()
    out = OPS.add_shared(mixed, *operands, gate)
    assert_close(out, expected)
    assert_same_bits(out[-1:], alone)
    assert_same_bits(torch.cat(operands), torch.cat((shared, x)))


def test_add_shared_refuses_other_shapes():
    rows = torch.zeros(2, 6)
    with pytest.raises(ValueError, match=r"mixed has shape \[2, 6\], shared \[2, 5\], x \[2, 6\], gate \[6\]"):
        OPS.add_shared(rows, torch.zeros(2, 5), rows, torch.zeros(6))
    with pytest.raises(ValueError, match=r"gate \[1\] and strides \(1,\)"):
        OPS.add_shared(rows, rows, rows, torch.zeros(1))
