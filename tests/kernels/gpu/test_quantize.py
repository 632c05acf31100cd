"""Rounding of rows to 8 bits: against torch's own conversion bit for bit, and within what the format allows."""

import pytest
import torch

from kernels.gpu.gate import gate_and_mul
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.rms_norm import add_rms_norm, rms_norm
from tests.support.kernels.batches import assert_quantized

FLOAT8 = torch.float8_e4m3fn


def bits(x):
    return x.view(torch.uint8)


def representable(dtype):
    """All finite values of an 8-bit float, in order."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return values[values.isfinite()].unique()


def test_rounds_as_torch_does(device, float8):
    """Every value of the format, the midpoints between neighbours, and the floats next to these."""
    values = representable(float8)
    middles = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(side)) for side in (-torch.inf, torch.inf)]
    row = torch.cat((values, middles, *near, torch.tensor([1e-10, -1e-10, 1e-40, 0.0, -0.0])))
    rows = quantize_rows(row[None].to(device), float8)
    assert rows.scales.tolist() == [[1.0]]  # the largest value is the format's
    assert bits(rows.values.cpu()[0]).tolist() == bits(row.to(float8)).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_all_16_bit_values_as_torch_does(device, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = every[every.abs() <= 448]  # NaN is not
    row = torch.cat((every, torch.tensor([448], dtype=dtype)))
    chunks = row.split(8192)
    for chunk in chunks:
        chunk = torch.cat((chunk, row[-1:]))
        rows = quantize_rows(chunk[None].to(device), FLOAT8)
        assert torch.equal(bits(rows.values.cpu()[0]), bits(chunk.float().to(FLOAT8)))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "n"), [(1, 1), (5, 7), (33, 80), (9, 576), (3, 1000), (2, 11008)])
def test_errors_are_within_the_precision_of_the_format(device, seed, float8, dtype, num_rows, n):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, n, generator=generator) * torch.logspace(-3, 3, num_rows)[:, None]
    x = x.to(dtype)
    rows = quantize_rows(x.to(device), float8)
    values, scales = rows.values.cpu().float(), rows.scales.cpu()
    largest, exact = torch.finfo(float8).max, x.float()
    torch.testing.assert_close(scales, exact.abs().amax(dim=1, keepdim=True) / largest, atol=0, rtol=1e-6)
    assert (values.abs().amax(dim=1) == largest).all()
    assert_quantized(rows.dequantized(torch.float32).cpu(), exact, float8)


@pytest.mark.parametrize(("num_rows", "n", "group_size"), [(5, 384, 128), (3, 256, 64), (2, 128, 128)])
def test_groups_are_quantized_like_rows_of_their_own(device, seed, float8, num_rows, n, group_size):
    """Bit for bit; in the plain kernel, after norms and after the gate.

    On a GPU a norm that quantizes may add up its squares in another order than one that does not: on an H200 with
    Triton 3.6 their results differ in the last bit.
    """
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.logspace(-3, 3, n // group_size).repeat_interleave(group_size)
    x = (torch.randn(num_rows, n, generator=generator) * magnitudes).to(device)
    ones, gates = torch.ones(n, device=device), torch.full_like(x, 3.0)
    made = [
        (quantize_rows(x, float8, group_size), x),
        (rms_norm(x, ones, 1e-6, quantize=float8, group_size=group_size), rms_norm(x, ones, 1e-6)),
        (
            add_rms_norm(x, x.clone(), ones, 1e-6, quantize=float8, group_size=group_size)[0],
            add_rms_norm(x, x.clone(), ones, 1e-6)[0],
        ),
        (
            gate_and_mul(torch.cat((gates, x), 1), "silu_and_mul", quantize=float8, group_size=group_size),
            gate_and_mul(torch.cat((gates, x), 1), "silu_and_mul"),
        ),
    ]
    for name, (rows, exact) in zip(("plain", "norm", "norm of a sum", "gate"), made, strict=True):
        alone = quantize_rows(exact.view(-1, group_size), float8)
        assert rows.group_size == group_size
        if device.type == "cuda" and "norm" in name:
            torch.testing.assert_close(rows.scales.flatten(), alone.scales.flatten(), rtol=2e-6, atol=0)
            limit = rows.scales.repeat_interleave(group_size, 1) * (rows.values.float().abs() / 16).clamp(min=2**-10)
            assert ((rows.dequantized(torch.float32) - exact).abs() <= limit * 1.001).all(), name
            continue
        assert torch.equal(rows.scales.flatten(), alone.scales.flatten()), name
        assert torch.equal(bits(rows.values).flatten(), bits(alone.values).flatten()), name
        assert torch.equal(rows.dequantized(torch.float32).flatten(), alone.dequantized(torch.float32).flatten())


def test_groups_that_do_not_divide_rows_are_rejected(device):
    with pytest.raises(ValueError, match="rows of 192 values are not divided by groups of 128"):
        quantize_rows(torch.ones(1, 192, device=device), FLOAT8, 128)


def test_the_longest_row_is_quantized(device, seed, float8):
    x = torch.randn(1, 32768, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    assert_quantized(quantize_rows(x.to(device), float8).dequantized(torch.float32).cpu(), x.float(), float8)


def test_rows_of_zeros_and_of_tiny_values_are_zeros(device, float8):
    x = torch.tensor([[0.0, -0.0, 0.0], [1e-38, -1e-38, 1e-45], [1.0, 1e-38, -1.0]], device=device)
    rows = quantize_rows(x, float8)
    assert rows.scales[:2].tolist() == [[1.0], [1.0]]
    assert rows.dequantized(torch.float32).tolist() == [[0, 0, 0], [0, 0, 0], [1, 0, -1]]


@pytest.mark.filterwarnings("ignore:invalid value")  # the interpreter's, of infinity times zero
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_stay_in_their_row(device, bad):
    x = torch.randn(3, 20)
    clean = quantize_rows(x.to(device), FLOAT8).dequantized(torch.float32)
    x[1, 7] = bad
    got = quantize_rows(x.to(device), FLOAT8).dequantized(torch.float32)
    assert got[1, 7].isnan()
    assert torch.equal(got[[0, 2]], clean[[0, 2]])


def test_empty_batch_gives_no_rows(device):
    rows = quantize_rows(torch.empty(0, 16, device=device), FLOAT8)
    assert rows.values.shape == (0, 16)
    assert rows.scales.shape == (0, 1)


def test_errors_name_what_is_wrong(device):
    with pytest.raises(
        ValueError, match="rows have 16385 values of 4 bytes, GPU operations on whole rows take up to 65536"
    ):
        quantize_rows(torch.ones(1, 16385, device=device), FLOAT8)
    with pytest.raises(ValueError, match=r"x has shape \[4, 3\], strides \(1, 4\); expected whole rows"):
        quantize_rows(torch.ones(3, 4, device=device).t(), FLOAT8)
    with pytest.raises(ValueError, match=r"x is torch\.float64, GPU operations take"):
        quantize_rows(torch.ones(3, 4, device=device).double(), FLOAT8)
