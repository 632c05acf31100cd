"""8-bit products through `torch._scaled_mm`: torch's rules for layouts, shapes and sizes are checked without a GPU."""

import re
from dataclasses import replace

import pytest
import torch

from kernels.gpu.linear import linear, pack_linear, pack_quantized
from kernels.gpu.linear_probe import check_row_scaled_product
from kernels.gpu.quantize import QuantizedRows
from kernels.gpu.targets import TARGETS, UnsupportedTargetError
from tests.support.kernels.scaled_mm import use_checked_products

SM_90, SM_120 = TARGETS["sm_90"], TARGETS["sm_120"]
FLOAT8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


@pytest.fixture
def products(monkeypatch):
    """Returns (rows, dtype, whether a bias is fused) of each product."""
    return use_checked_products(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_accepts_the_layouts_of_quantized_layers(products, seed, dtype):
    """Layers quantised on load and layers of checkpoints, for one row and many."""
    generator = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn(96, 64, generator=generator).to(dtype), torch.randn(96, generator=generator).to(dtype)
    scales = [torch.rand(shape, generator=generator) for shape in ((), (1,), (96,), (96, 1))]
    layers = [pack_quantized(weight.to(FLOAT8), scale, bias, dtype=dtype, target=SM_90) for scale in scales]
    layers.append(pack_linear(weight, bias, quantization="fp8", target=SM_90))
    for layer in layers:
        for num_rows in (1, 2, 16, 33):
            values = torch.randn(num_rows, 64, generator=generator).to(FLOAT8)
            rows = QuantizedRows(values, torch.rand(num_rows, 1, generator=generator))
            out = linear(rows, layer)
            assert out.dtype is dtype
            exact = rows.dequantized(torch.float32) @ (layer.weight.float() * layer.scales) + bias.float()
            # rounded once, or twice where the bias is added to the rounded product
            torch.testing.assert_close(out.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    assert products == [(num_rows, dtype, dtype is not torch.float32) for num_rows in (1, 2, 16, 33)] * 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(32, 64).to(FLOAT8)}, "mat2 must be col_major"),
        ({"scales": torch.ones(64, 1)}, "Invalid scaling configuration"),
        ({"weight": torch.zeros(40, 32).to(FLOAT8).t()}, "divisible by 16"),
    ],
)
def test_the_checked_product_refuses_other_layouts(products, change, message):
    layer = pack_linear(torch.zeros(64, 32), None, quantization="fp8", target=SM_90)
    with pytest.raises(RuntimeError, match=message):
        linear(QuantizedRows(torch.zeros(3, 32).to(FLOAT8), torch.ones(3, 1)), replace(layer, **change))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_probe_multiplies_16_rows_and_1_row_with_and_without_a_bias(products, dtype):
    check_row_scaled_product("--quantization fp8", dtype, device=CPU, target=SM_90, gpu_name="NVIDIA H200")
    assert products == [(rows, dtype, has and dtype is torch.bfloat16) for has in (False, True) for rows in (16, 1)]


@pytest.mark.parametrize(
    ("dtype", "instead"),
    [
        (torch.float16, "; use --dtype bfloat16, or serve the model without 8-bit weights"),
        (torch.bfloat16, "NOT_SUPPORTED; serve the model without 8-bit weights"),
    ],
)
def test_a_product_that_torch_lacks_is_refused_in_one_line(products, monkeypatch, dtype, instead):
    def fails(*_args, **_options):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nand a trace")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    name = str(dtype).removeprefix("torch.")
    wanted = f"8-bit products with a scale per row in {name} on RTX 5090 (sm_120): CUDA error: CUBLAS_STATUS_NOT"
    with pytest.raises(UnsupportedTargetError, match=re.escape(wanted)) as caught:
        check_row_scaled_product("--quantization fp8", dtype, device=CPU, target=SM_120, gpu_name="RTX 5090")
    message = str(caught.value)
    assert message.startswith(f"--quantization fp8: torch {torch.__version__} (CUDA ")
    assert message.endswith(instead)
    assert "\n" not in message
