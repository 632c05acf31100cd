"""Gates of feed-forward layers and of attention, in the model's dtype and in 8 bits, against PyTorch's in fp32."""

from functools import partial

import pytest
import torch

from kernels.gates import ClampedGate
from kernels.gpu.gate import gate_and_mul, gate_columns
from tests.support.kernels.batches import assert_close, assert_quantized

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (5, 7), (33, 80), (3, 1536), (2, 4864), (1, 18944)]


def random_gate_up(seed, num_rows, n, dtype):
    return torch.randn(num_rows, 2 * n, generator=torch.Generator().manual_seed(seed)).to(dtype)


ACTIVATIONS = {
    "silu_and_mul": torch.nn.functional.silu,
    "gelu_and_mul": partial(torch.nn.functional.gelu, approximate="tanh"),
}
gates = pytest.mark.parametrize("kind", ACTIVATIONS)


def exact(gate_up, kind):
    gate, up = gate_up.float().chunk(2, dim=1)
    return ACTIVATIONS[kind](gate) * up


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n"), SHAPES)
@gates
def test_gates_the_second_half(device, seed, dtype, num_rows, n, kind):
    gate_up = random_gate_up(seed, num_rows, n, dtype)
    out = gate_and_mul(gate_up.to(device), kind)
    assert out.dtype is dtype
    assert out.shape == (num_rows, n)
    assert_close(out.cpu(), exact(gate_up, kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_clamped_gate_limits_both_halves_and_keeps_nan(device, seed, dtype):
    gate_up = 3 * random_gate_up(seed, 33, 80, dtype)
    gate_up[3, 7] = gate_up[5, 90] = torch.nan
    gate, up = gate_up.double().chunk(2, dim=1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    out = gate_and_mul(gate_up.to(device), ClampedGate(1.702, 2.5)).cpu()
    assert out.isnan().nonzero().tolist() == [[3, 7], [5, 10]]
    assert_close(out.nan_to_num(), ((up + 1) * gate * torch.sigmoid(1.702 * gate)).nan_to_num())


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n"), [(1, 16), (9, 80), (3, 1536), (1, 14336)])
@gates
def test_quantized_results_are_rounded_once(device, seed, float8, dtype, num_rows, n, kind):
    gate_up = random_gate_up(seed, num_rows, n, dtype)
    rows, wanted = gate_and_mul(gate_up.to(device), kind, quantize=float8), exact(gate_up, kind)
    assert rows.values.dtype is float8
    torch.testing.assert_close(
        rows.scales.cpu(), wanted.abs().amax(dim=1, keepdim=True) / torch.finfo(float8).max, atol=0, rtol=1e-5
    )
    assert_quantized(rows.dequantized(torch.float32).cpu(), wanted, float8)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's, where a GPU has infinity
@gates
def test_large_gates_open_or_close(device, kind):
    gate_up = torch.tensor([[-1e4, -100.0, -20.0, 20.0, 100.0, 1e4] + 6 * [3.0]])
    out = gate_and_mul(gate_up.to(device), kind).cpu()
    assert_close(out[:, :3], torch.tensor([[0.0, 0.0, exact(gate_up, kind)[0, 2]]]))
    assert_close(out[:, 3:], 3 * gate_up[:, 3:6])


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n"), [(1, 16), (5, 7), (33, 80), (2, 4096)])
def test_columns_of_wider_rows_gate(device, seed, dtype, num_rows, n):
    x, wider = (
        random_gate_up(seed, num_rows, n, dtype)[:, :n].contiguous(),
        random_gate_up(seed + 1, num_rows, n, dtype),
    )
    on_device = x.to(device, copy=True)
    for first in (0, n - 1, n):
        gate = wider[:, first : first + n]
        out = gate_columns(on_device, wider.to(device)[:, first : first + n])
        assert out.dtype is dtype
        assert out.is_contiguous()
        assert_close(out.cpu(), x.float() * gate.float().sigmoid())


@pytest.mark.parametrize("group_size", [None, 16])
def test_quantized_columns_are_rounded_once(device, seed, float8, group_size):
    x, wider = (
        random_gate_up(seed, 9, 80, torch.bfloat16)[:, :80].contiguous(),
        random_gate_up(seed, 9, 80, torch.bfloat16),
    )
    rows = gate_columns(x.to(device), wider.to(device)[:, 80:], quantize=float8, group_size=group_size)
    assert rows.group_size == (group_size or 80)
    wanted = (x.float() * wider[:, 80:].float().sigmoid()).view(9, -1, rows.group_size)
    assert_quantized(rows.dequantized(torch.float32).cpu().view(wanted.shape), wanted, float8)


def test_nan_stays_where_it_gates_or_is_gated(device):
    x, gate = torch.randn(3, 40, device=device), torch.randn(3, 50, device=device)
    x[1, 5] = gate[2, 17] = torch.nan
    assert gate_columns(x, gate[:, 10:]).isnan().nonzero().tolist() == [[1, 5], [2, 7]]


@gates
def test_nan_stays_where_it_is(device, kind):
    gate_up = torch.randn(3, 40, device=device)
    gate_up[1, 5] = gate_up[1, 27] = torch.nan
    isnan = gate_and_mul(gate_up, kind).isnan()
    assert isnan.nonzero().tolist() == [[1, 5], [1, 7]]
    rows = gate_and_mul(gate_up, kind, quantize=torch.float8_e4m3fn).dequantized(torch.float32)
    assert rows.isnan().any(dim=1).tolist() == [False, True, False]


def test_empty_batch_gives_no_rows(device):
    empty = torch.empty(0, 80, device=device)
    assert gate_and_mul(empty, "silu_and_mul").shape == (0, 40)
    assert gate_columns(empty, empty).shape == (0, 80)


def test_errors_name_what_is_wrong(device):
    with pytest.raises(ValueError, match="gate_up has rows of 7 values, which are not two halves"):
        gate_and_mul(torch.ones(1, 7, device=device), "silu_and_mul")
    with pytest.raises(ValueError, match=r"gate_up has shape \[2, 3, 4\]"):
        gate_and_mul(torch.ones(2, 3, 4, device=device), "silu_and_mul")
    x = torch.ones(2, 3, device=device)
    with pytest.raises(ValueError, match=r"x is torch\.float32 of shape \[2, 3\], gate torch\.float32 of \[2, 2\]"):
        gate_columns(x, x[:, 1:])
    with pytest.raises(ValueError, match=r"gate has shape \[3, 2\], strides \(1, 3\); expected columns of rows"):
        gate_columns(x, x.t())
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\], strides \(3, 1\); expected whole rows"):
        gate_columns(x[:, 1:], x[:, 1:])
