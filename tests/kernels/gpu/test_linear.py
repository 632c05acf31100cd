"""Linear layers in the model's dtype and in 8 bits, against fp32 within what the formats allow."""

import logging

import pytest
import torch

from kernels.gpu.linear import _log_unquantized, linear, pack_linear, pack_quantized
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.rms_norm import rms_norm
from kernels.gpu.targets import TARGETS, UnsupportedTargetError
from tests.support.kernels.batches import assert_close, normal

SM_90, GFX942 = TARGETS["sm_90"], TARGETS["gfx942"]
FLOAT8 = torch.float8_e4m3fn


def rounding(x, scales):
    """Returns the largest rounding error of each value in 8 bits: half of its last bit, or of the smallest value."""
    return torch.maximum(x.abs() * 2**-4, scales * 2**-10) * (1 + 1e-5)


def product_bound(x, weight):
    """Returns how much rounding both sides to 8 bits can change each output."""
    off_x = rounding(x, x.abs().amax(dim=1, keepdim=True) / 448)
    off_weight = rounding(weight, weight.abs().amax(dim=1, keepdim=True) / 448)
    return off_x @ weight.abs().T + (x.abs() + off_x) @ off_weight.T


def assert_within(out, exact, bound, dtype):
    """Checks a product of rounded sides that was itself rounded to dtype."""
    error = (out.float().cpu() - exact).abs()
    allowed = bound + exact.abs() * 2 * torch.finfo(dtype).eps + 1e-5
    assert (error <= allowed).all(), f"{(error / allowed).max()} of what is allowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_unquantized_layers_equal_torch(device, seed, dtype, has_bias):
    x, weight = normal(5, 33, seed=seed).to(device, dtype), normal(7, 33, seed=seed + 1).to(device, dtype)
    bias = normal(7, seed=seed + 2).to(device, dtype) if has_bias else None
    packed = pack_linear(weight, bias, quantization=None, target=TARGETS["sm_80"])
    assert packed.weight is weight
    assert (packed.in_features, packed.out_features) == (33, 7)
    assert torch.equal(linear(x, packed), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "size_in", "size_out"), [(1, 16, 32), (5, 576, 96), (33, 896, 64)])
def test_8_bit_products_are_within_the_error_of_both_roundings(
    device, seed, dtype, has_bias, num_rows, size_in, size_out
):
    x, weight = normal(num_rows, size_in, seed=seed).to(dtype), normal(size_out, size_in, seed=seed + 1)
    weight = (weight * torch.logspace(-2, 2, size_out)[:, None]).to(dtype)  # channels of very different size
    bias = normal(size_out, seed=seed + 2).to(dtype) if has_bias else None
    packed = pack_linear(weight.to(device), None if bias is None else bias.to(device), quantization="fp8", target=SM_90)
    assert packed.weight.dtype is FLOAT8
    assert packed.scales.shape == (1, size_out)
    assert (packed.in_features, packed.out_features) == (size_in, size_out)
    out = linear(x.to(device), packed)
    assert out.dtype is dtype
    exact = x.float() @ weight.float().T
    bound = product_bound(x.float(), weight.float())
    assert_within(out, exact if bias is None else exact + bias.float(), bound, dtype)


def test_typical_error_is_that_of_3_mantissa_bits(device, seed):
    """Half of a last bit is 1/16 at most, 0.026 as a root mean square over all mantissas; two sides make 0.037."""
    x, weight = normal(64, 1024, seed=seed), normal(128, 1024, seed=seed + 1)
    out = linear(x.to(device), pack_linear(weight.to(device), None, quantization="fp8", target=SM_90)).cpu()
    exact = x @ weight.T
    error = float((out - exact).norm() / exact.norm())
    assert 0.033 < error < 0.041, f"seed {seed}: {error}"


def test_quantized_rows_are_accepted(device, seed):
    """Rows quantised by the norm give the results of rows that the layer quantises."""
    x, norm_weight = normal(7, 64, seed=seed).to(device), torch.ones(64, device=device)
    weight = normal(48, 64, seed=seed + 1).to(device)
    packed = pack_linear(weight, None, quantization="fp8", target=SM_90)
    rows = rms_norm(x, norm_weight, 1e-5, quantize=FLOAT8)
    normed = rms_norm(x, norm_weight, 1e-5)
    assert_close(linear(rows, packed), linear(normed, packed))
    plain = pack_linear(weight, None, quantization=None, target=SM_90)
    assert_close(linear(rows, plain), rows.dequantized(torch.float32) @ weight.T)


def test_the_largest_weight_of_each_channel_is_exact():
    weight = normal(16, 32, seed=0) * torch.logspace(-8, 8, 16)[:, None]
    weight[3] = 0
    packed = pack_linear(weight, None, quantization="fp8", target=SM_90)
    values = (packed.weight.float() * packed.scales).t()
    torch.testing.assert_close(values.abs().amax(dim=1), weight.abs().amax(dim=1))
    assert not values[3].any()


@pytest.mark.parametrize(("size_out", "size_in"), [(24, 64), (64, 40)])
def test_layers_of_other_sizes_stay_unquantized_with_a_log_line(device, seed, caplog, size_out, size_in):
    weight = normal(size_out, size_in, seed=seed).to(device)
    _log_unquantized.cache_clear()  # it is logged once for each size
    with caplog.at_level(logging.WARNING, "kernels.gpu.linear"):
        packed = [pack_linear(weight, None, quantization="fp8", target=SM_90) for _ in range(2)]
    assert packed[1].weight is weight
    wanted = f"linear layers of {size_in} inputs and {size_out} outputs are not quantized: 8-bit products take "
    assert [record.message for record in caplog.records] == [wanted + "multiples of 16"]
    x = normal(3, size_in, seed=seed + 1).to(device)
    assert torch.equal(linear(x, packed[0]), torch.nn.functional.linear(x, weight))
    assert linear(quantize_rows(x, FLOAT8), packed[0]).shape == (3, size_out)


@pytest.mark.parametrize("shape", [(), (1,), (48,), (48, 1)])
def test_fp8_checkpoint_weights_are_used_unchanged(device, seed, shape):
    values = (normal(48, 64, seed=seed) * 100).to(FLOAT8)
    scales, bias = normal(*shape, seed=seed + 1).abs() + 0.1, normal(48, seed=seed + 2).to(torch.bfloat16)
    meant = values.float() * scales.reshape(-1, 1)
    on_device = [tensor.to(device) for tensor in (values, scales, bias)]
    packed = pack_quantized(*on_device, dtype=torch.bfloat16, target=SM_90)
    assert packed.weight.data_ptr() == on_device[0].data_ptr()
    assert torch.equal((packed.weight.float() * packed.scales).t().cpu(), meant)
    x = normal(5, 64, seed=seed + 3).to(torch.bfloat16)
    bound = rounding(x.float(), x.float().abs().amax(dim=1, keepdim=True) / 448) @ meant.abs().T
    out = linear(x.to(device), packed)
    assert out.dtype is torch.bfloat16
    assert_within(out, x.float() @ meant.T + bias.float(), bound, torch.bfloat16)


def test_fp8_checkpoint_values_are_unchanged_in_the_amd_format():
    every = torch.arange(256, dtype=torch.uint8).view(FLOAT8).reshape(16, 16)
    packed = pack_quantized(every, torch.tensor([0.5]), None, dtype=torch.bfloat16, target=GFX942)
    assert packed.weight.dtype is torch.float8_e4m3fnuz
    meant = (packed.weight.float() * packed.scales).t()
    torch.testing.assert_close(meant, every.float() * 0.5, atol=0, rtol=0, equal_nan=True)


def test_fp8_checkpoints_of_other_sizes_are_dequantized(caplog):
    values = (normal(20, 64, seed=0) * 100).to(FLOAT8)
    packed = pack_quantized(values, torch.tensor(0.5), None, dtype=torch.float16, target=SM_90)
    assert torch.equal(packed.weight, (values.float() * 0.5).half())
    assert packed.scales is None


def test_unsupported_options_are_rejected_by_name():
    weight = torch.ones(16, 16)
    with pytest.raises(UnsupportedTargetError, match="--quantization fp8: sm_86 has no 8-bit floats"):
        pack_linear(weight, None, quantization="fp8", target=TARGETS["sm_86"])
    with pytest.raises(UnsupportedTargetError, match=r"gfx942 has 8-bit products for models in bfloat16, .*float16"):
        pack_linear(weight.half(), None, quantization="fp8", target=GFX942)
    with pytest.raises(ValueError, match=r"scales have shape \[3\], expected one for all or one for each of 16"):
        pack_quantized(weight.to(FLOAT8), torch.ones(3), None, dtype=torch.float16, target=SM_90)
    packed = pack_linear(weight, None, quantization=None, target=SM_90)
    with pytest.raises(ValueError, match="rows of x have 8 values, the layer takes 16"):
        linear(torch.ones(2, 8), packed)
