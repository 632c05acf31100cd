"""RMSNorm with and without a residual, in the model's dtype and in 8 bits, against the reference."""

import pytest
import torch

from kernels.gpu.rms_norm import add_rms_norm, norm_columns, rms_norm
from kernels.reference.rms_norm import rms_norm as reference_rms_norm
from tests.support.kernels.batches import assert_close, assert_quantized, normal

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (5, 7), (33, 96), (3, 576), (2, 896), (2, 3072), (3, 4096), (1, 8192), (1, 16384)]
CASES = [(dtype, *shape) for dtype in DTYPES for shape in SHAPES] + [(torch.bfloat16, 1, 18944)]


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "num_rows", "n"), CASES)
def test_rms_norm_equals_reference(device, seed, dtype, num_rows, n):
    x, weight = normal(num_rows, n, seed=seed).to(dtype), normal(n, seed=seed + 1).to(dtype)
    on_device = x.to(device)
    out = rms_norm(on_device, weight.to(device), EPS)
    assert out.dtype is dtype
    assert_close(out.cpu(), reference_rms_norm(x, weight, EPS))
    assert torch.equal(on_device.cpu(), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "n"), [(0, 64), (64, 576), (640, 60)])
def test_columns_are_normed_in_place(device, seed, dtype, first, n):
    x, weight = normal(33, 700, seed=seed).to(dtype), normal(n, seed=seed + 1).to(dtype)
    out = x.to(device, copy=True)
    norm_columns(out, first, weight.to(device), EPS)
    columns = slice(first, first + n)
    assert_close(out.cpu()[:, columns], reference_rms_norm(x[:, columns], weight, EPS))
    out[:, columns] = x[:, columns].to(device)
    assert torch.equal(out.cpu(), x)
    with pytest.raises(ValueError, match="x has 700 columns"):
        norm_columns(out, 701 - n, weight.to(device), EPS)


@pytest.mark.sampled
@pytest.mark.parametrize(("dtype", "num_rows", "n"), CASES)
def test_add_rms_norm_adds_in_place_and_norms_what_it_stored(device, seed, dtype, num_rows, n):
    x, residual, weight = (
        normal(*shape, seed=seed + i).to(dtype) for i, shape in enumerate([(num_rows, n)] * 2 + [(n,)])
    )
    stream = residual.to(device)
    if stream is residual:
        stream = residual.clone()
    out, total = add_rms_norm(x.to(device), stream, weight.to(device), EPS)
    assert total is stream
    assert_close(total.cpu(), x + residual)
    assert out.dtype is dtype
    assert_close(out.cpu(), reference_rms_norm(total.cpu(), weight, EPS))


@pytest.mark.sampled
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "n"), [(1, 16), (9, 80), (3, 576), (2, 4096), (1, 16384)])
def test_quantized_norms_are_rounded_once(device, seed, float8, dtype, num_rows, n, adds):
    x, residual, weight = (
        normal(*shape, seed=seed + i).to(dtype) for i, shape in enumerate([(num_rows, n)] * 2 + [(n,)])
    )
    if adds:
        stream = residual.clone().to(device)
        rows, total = add_rms_norm(x.to(device), stream, weight.to(device), EPS, quantize=float8)
        assert total is stream
        assert total.dtype is dtype
        assert_close(total.cpu(), x + residual)
        x = total.cpu()
    else:
        rows = rms_norm(x.to(device), weight.to(device), EPS, quantize=float8)
    exact = reference_rms_norm(x.float(), weight, EPS)
    assert rows.values.dtype is float8
    assert rows.scales.shape == (num_rows, 1)
    torch.testing.assert_close(
        rows.scales.cpu(), exact.abs().amax(dim=1, keepdim=True) / torch.finfo(float8).max, atol=0, rtol=1e-5
    )
    assert_quantized(rows.dequantized(torch.float32).cpu(), exact, float8)


def test_eps_is_added_to_the_mean_square(device):
    x = torch.full((1, 4), 0.1, device=device)
    assert_close(rms_norm(x, torch.ones(4, device=device), 0.03).cpu(), torch.full((1, 4), 0.5))
    assert_close(rms_norm(x * 0, torch.ones(4, device=device), EPS).cpu(), torch.zeros(1, 4))


@pytest.mark.parametrize("n", [96, 2048])
def test_a_row_has_the_same_bits_among_any_number_of_rows(device, seed, n):
    x, weight = normal(37, n, seed=seed).to(device), normal(n, seed=seed + 1).to(device)
    together = rms_norm(x, weight, EPS)
    for rows in (slice(0, 1), slice(36, 37), slice(5, 23)):
        assert torch.equal(rms_norm(x[rows].clone(), weight, EPS), together[rows])


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, of a row without a largest value
def test_nan_stays_in_its_row(device):
    x = torch.randn(3, 80, device=device)
    x[1, 5] = torch.nan
    weight = torch.ones(80, device=device)
    assert rms_norm(x, weight, EPS).isnan().all(dim=1).tolist() == [False, True, False]
    assert not rms_norm(x, weight, EPS)[[0, 2]].isnan().any()
    values = rms_norm(x, weight, EPS, quantize=torch.float8_e4m3fn).dequantized(torch.float32)
    assert values.isnan().any(dim=1).tolist() == [False, True, False]


def test_empty_batch_gives_no_rows(device):
    x, weight = torch.empty(0, 80, device=device), torch.ones(80, device=device)
    assert rms_norm(x, weight, EPS).shape == (0, 80)
    assert add_rms_norm(x, x, weight, EPS)[0].shape == (0, 80)


def test_errors_name_what_is_wrong(device):
    x, weight = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match=r"weight has shape \[5\], rows of x have 4 values"):
        rms_norm(x, torch.ones(5, device=device), EPS)
    with pytest.raises(ValueError, match=r"x has shape \[2, 2\], strides \(4, 2\); expected whole rows"):
        rms_norm(x[:, ::2], weight, EPS)
    with pytest.raises(ValueError, match=r"x is torch\.float32 of shape \[2, 4\], residual torch\.float32 of \[1, 4\]"):
        add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match=r"residual torch\.float16 of \[2, 4\]"):
        add_rms_norm(x, x.half(), weight, EPS)
