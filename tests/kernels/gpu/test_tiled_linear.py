"""Linear layers in Triton: values against sums in fp64, and with `--batch-invariant` the same bits in any batch."""

import pytest
import torch

from kernels.gpu import tiled_linear as module
from kernels.gpu.block_scales import pack_block_scaled
from kernels.gpu.grouped_linear import grouped_span, pack_grouped
from kernels.gpu.linear import pack_linear
from kernels.gpu.quantize import quantize_rows
from kernels.gpu.targets import TARGETS, target_of
from kernels.gpu.tiled_linear import is_tiled, tiled_linear
from kernels.gpu.tiles import ProductTile, product_splits, product_tile
from kernels.grouped_weights import GroupedWeights
from tests.support.engine.weights import quantized_in_blocks
from tests.support.kernels.batches import assert_close, assert_same_bits, normal

SHARED, ALONE = 1_000_000, 1  # processors: a program for each part of the inputs, or one for all of them


def make_layer(seed, num_in, num_out, dtype, has_bias, device, target):
    weight = (normal(num_out, num_in, seed=seed) * num_in**-0.5).to(device, dtype)
    bias = normal(num_out, seed=seed + 1).to(device, dtype) if has_bias else None
    return pack_linear(weight, bias, quantization=None, target=target)


def invariant_linear(x, layer, target, num_processors):
    return tiled_linear(x, layer, target=target, num_processors=num_processors, batch_invariant=True)


@pytest.mark.parametrize(
    ("dtype", "has_bias", "num_processors", "num_rows", "num_in", "num_out"),
    [
        (torch.float32, False, ALONE, 65, 16, 132),
        (torch.float32, True, SHARED, 5, 1037, 99),
        (torch.bfloat16, True, ALONE, 3, 1037, 7),
        (torch.float16, False, SHARED, 3, 1024, 9),
    ],
)
def test_products_equal_torch(device, target, seed, dtype, has_bias, num_processors, num_rows, num_in, num_out):
    layer = make_layer(seed, num_in, num_out, dtype, has_bias, device, target)
    x = normal(num_rows, num_in, seed=seed + 2).to(device, dtype)
    out = invariant_linear(x, layer, target, num_processors)
    assert out.dtype is dtype
    bias = None if layer.bias is None else layer.bias.double()
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), bias)
    assert_close(out.cpu(), exact.float().cpu())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_in_any_batch(device, target, seed, dtype):
    """Whatever its place in its tile, the other rows, and the number of programs that share its inputs."""
    layer = make_layer(seed, 1037, 99, dtype, True, device, target)
    assert product_splits(product_tile(target, dtype.itemsize), 1037, 99) == 2
    x = normal(67, 1037, seed=seed + 2).to(device, dtype)
    whole = invariant_linear(x, layer, target, ALONE)
    for rows in (slice(67), slice(66, 67), slice(60, 65)):
        for num_processors in (SHARED, ALONE):
            part = invariant_linear(x[rows], layer, target, num_processors)
            assert_same_bits(part.float(), whole[rows].float())


def test_no_rows_give_no_rows(device, target):
    layer = make_layer(0, 64, 32, torch.float32, False, device, target)
    x = torch.empty(0, 64, device=device)
    assert invariant_linear(x, layer, target, ALONE).shape == (0, 32)


def test_rows_of_another_width_are_rejected(device, target):
    layer = make_layer(0, 64, 32, torch.float32, False, device, target)
    with pytest.raises(ValueError, match="rows of x have 63 values, the layer takes 64"):
        tiled_linear(
            torch.empty(2, 63, device=device), layer, target=target, num_processors=ALONE, batch_invariant=True
        )


@pytest.mark.parametrize(
    ("num_in", "num_out", "splits"), [(4096, 4096, 4), (14336, 4096, 4), (4096, 128256, 1), (64, 64, 1), (8192, 64, 16)]
)
def test_splits_follow_from_the_weights(num_in, num_out, splits):
    assert product_splits(ProductTile(128, 128, 64, 8, 3), num_in, num_out) == splits


def test_few_rows_share_the_inputs_among_programs_and_many_do_not(device, target, monkeypatch):
    launched = []

    class Recorder:
        def __init__(self, kernel, **options):
            self.name = options.get("SPLITS_PER_PROGRAM", "add")

        def __call__(self, grid, *args):
            launched.append((self.name, grid))

    monkeypatch.setattr(module, "BoundKernel", Recorder)
    module._bind.cache_clear()
    try:
        layer = make_layer(0, 2048, 64, torch.float32, False, device, target)
        for num_rows in (1, 64 * 200):
            tiled_linear(
                torch.zeros(num_rows, 2048, device=device),
                layer,
                target=target,
                num_processors=132,
                batch_invariant=True,
            )
    finally:
        module._bind.cache_clear()
    assert launched == [(1, (1, 4)), ("add", (1, 1)), (4, (200, 1))]


@pytest.fixture(params=["8-bit inputs", "16 or 32 bits"])
def block_target(request, device, target):
    """Target of the device; under the interpreter one with and one without 8-bit floats."""
    if device.type == "cuda":
        if (target.fp8_dtype is None) == (request.param == "8-bit inputs"):
            pytest.skip("the other kind of GPU")
        return target
    return TARGETS["sm_90" if request.param == "8-bit inputs" else "sm_80"]


def make_block_scaled(seed, num_in, num_out, dtype, has_bias, device, target):
    """Blocks of very different magnitude; returns the packed layer and its weights in fp64."""
    blocks = normal(num_out // 128, 1, num_in // 128, 1, seed=seed).exp() * num_in**-0.5
    weight = (normal(num_out // 128, 128, num_in // 128, 128, seed=seed + 1) * blocks).view(num_out, num_in)
    values, scales = quantized_in_blocks(weight)
    bias = normal(num_out, seed=seed + 2).to(dtype) if has_bias else None
    on_device = (None if tensor is None else tensor.to(device) for tensor in (values, scales, bias))
    exact = values.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return pack_block_scaled(*on_device, dtype=dtype, target=target), exact


@pytest.mark.parametrize(
    ("dtype", "has_bias", "num_processors", "num_rows", "num_in", "num_out"),
    [
        (torch.float32, True, ALONE, 3, 256, 128),  # the smallest tile
        (torch.float16, False, SHARED, 20, 1152, 256),  # two parts, the second with fewer steps
        (torch.bfloat16, True, SHARED, 70, 1152, 128),
        pytest.param(torch.float32, False, SHARED, 200, 2048, 256, marks=pytest.mark.slow),
    ],
)
def test_products_with_scales_per_block_equal_sums_in_fp64(
    device, block_target, seed, dtype, has_bias, num_processors, num_rows, num_in, num_out
):
    """An element is off by n roundings of fp32 of the sum of its n terms' magnitudes, and by that of the result.

    The matrix units of a GPU keep some 14 bits of the sum of 128 products of 8-bit floats, which they take in up to
    eight steps.
    """
    layer, weight = make_block_scaled(seed, num_in, num_out, dtype, has_bias, device, block_target)
    x = (normal(num_rows, num_in, seed=seed + 3) * normal(num_rows, 1, seed=seed + 4).exp()).to(device, dtype)
    options = {"target": block_target, "num_processors": num_processors}
    out = tiled_linear(x, layer, **options, batch_invariant=False)
    assert out.dtype is dtype
    rows, unit = x.cpu().double(), num_in * 2.0**-24
    if block_target.fp8_dtype is not None:
        quantized = quantize_rows(x, block_target.fp8_dtype, 128)
        assert torch.equal(tiled_linear(quantized, layer, **options, batch_invariant=False), out)
        rows = quantized.values.cpu().double() * quantized.scales.cpu().double().repeat_interleave(128, 1)
        unit += 8 * 2.0**-13 if device.type == "cuda" else 0
    exact = rows @ weight.T + (0 if layer.bias is None else layer.bias.cpu().double())
    magnitudes = rows.abs() @ weight.abs().T + (0 if layer.bias is None else layer.bias.cpu().double().abs())
    allowed = unit * magnitudes + torch.finfo(dtype).eps * exact.abs()
    assert bool(((out.cpu().double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize(
    ("dtype", "has_bias", "num_processors", "num_rows", "num_in", "num_out"),
    [
        (torch.bfloat16, True, ALONE, 3, 1040, 96),
        (torch.float32, False, SHARED, 40, 2064, 48),  # four parts, the last with fewer steps
        (torch.float16, True, SHARED, 70, 1024, 144),
    ],
)
def test_products_with_scales_per_channel_equal_sums_in_fp64(
    device, float8, seed, dtype, has_bias, num_processors, num_rows, num_in, num_out
):
    """Matrix units may keep 14 bits of the sum after each instruction of 32 inputs; see `_FAST_ACCUMULATION`."""
    target = TARGETS["sm_90"]
    if device.type == "cuda" and target_of(device) is not target:
        pytest.skip("not the GPU of these tiles")
    weight = (normal(num_out, num_in, seed=seed) * normal(num_out, 1, seed=seed + 1).exp()).to(device, dtype)
    bias = normal(num_out, seed=seed + 2).to(device, dtype) if has_bias else None
    layer = pack_linear(weight, bias, quantization="fp8", target=target)
    x = (normal(num_rows, num_in, seed=seed + 3) * normal(num_rows, 1, seed=seed + 4).exp()).to(device, dtype)
    options = {"target": target, "num_processors": num_processors, "batch_invariant": False}
    out = tiled_linear(x, layer, **options)
    assert out.dtype is dtype
    quantized = quantize_rows(x, float8)
    assert torch.equal(tiled_linear(quantized, layer, **options), out)
    rows = quantized.values.cpu().double() * quantized.scales.cpu().double()
    weight = (layer.weight.cpu().double() * layer.scales.cpu().double()).T
    shift = 0 if bias is None else bias.cpu().double()
    exact, magnitudes = rows @ weight.T + shift, rows.abs() @ weight.abs().T + abs(shift)
    unit = num_in * 2.0**-24 + (num_in / 32 * 2.0**-13 if device.type == "cuda" else 0)
    allowed = unit * magnitudes + torch.finfo(dtype).eps * exact.abs()
    assert bool(((out.cpu().double() - exact).abs() <= allowed).all())


@pytest.mark.parametrize("num_processors", [SHARED, ALONE])
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_in_any_batch_with_scales_per_channel(device, float8, seed, num_processors):
    target = TARGETS["sm_90"]
    layer = pack_linear(normal(48, 2064, seed=seed).to(device), None, quantization="fp8", target=target)
    x = normal(67, 2064, seed=seed + 3).to(device)
    whole = invariant_linear(x, layer, target, ALONE)
    for rows in (slice(66, 67), slice(40, 65)):
        assert_same_bits(invariant_linear(x[rows], layer, target, num_processors), whole[rows])


def test_few_rows_in_8_bits_are_tiled_on_the_gpu_that_was_measured(device):
    weight = normal(64, 64, seed=0).to(device)
    for name, quantization, num_rows, expected in (
        ("sm_90", "fp8", 1, True),
        ("sm_90", "fp8", 128, True),
        ("sm_90", "fp8", 129, False),
        ("sm_90", None, 1, False),
        ("sm_89", "fp8", 1, False),
    ):
        target = TARGETS[name]
        layer = pack_linear(weight, None, quantization=quantization, target=target)
        assert is_tiled(num_rows, layer, target) is expected


@pytest.mark.parametrize("num_processors", [SHARED, ALONE])
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_in_any_batch_with_scales_per_block(device, block_target, seed, num_processors):
    """Also where the tile would be another one without --batch-invariant."""
    layer, _ = make_block_scaled(seed, 1152, 128, torch.float32, True, device, block_target)
    x = normal(67, 1152, seed=seed + 3).to(device)
    whole = invariant_linear(x, layer, block_target, ALONE)
    for rows in (slice(66, 67), slice(40, 65)):
        assert_same_bits(invariant_linear(x[rows], layer, block_target, num_processors), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_8_bit_weight_is_exact_on_gpus_without_such_floats(device, target, dtype):
    """The identity picks the weights; a NaN makes its block NaN, and no other."""
    if device.type == "cuda" and target.fp8_dtype is not None:
        pytest.skip("the GPU multiplies in 8 bits")
    target = target if device.type == "cuda" else TARGETS["sm_80"]
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 256).contiguous()
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[200, 130] = 0xFF
    values = codes.view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 0.5], [2.0, 0.25]])
    layer = pack_block_scaled(values.to(device), scales.to(device), None, dtype=dtype, target=target)
    x = torch.eye(256, dtype=dtype, device=device)
    out = tiled_linear(x, layer, target=target, num_processors=ALONE, batch_invariant=False).cpu()
    exact = (values.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)).T
    assert torch.equal(out[:, :128], exact[:, :128].to(dtype))
    assert out[:, 128:].isnan().all()


def test_fewer_rows_use_smaller_tiles_and_start_up_compiles_all(device, target):
    layer, _ = make_block_scaled(0, 128, 128, torch.bfloat16, False, device, target)
    sizes = [module._tiles(layer, 1, TARGETS["sm_90"], num_rows, False) for num_rows in (1, 16, 17, 64, 65, 9000)]
    assert [tile.block_m for (tile,) in sizes] == [16, 16, 64, 64, 128, 128]
    fixed = [module._tiles(layer, 1, TARGETS["sm_90"], num_rows, True) for num_rows in (1, 9000)]
    assert fixed[0] == fixed[1]


def make_grouped(seed, num_in, num_out, group_size, num_bits, dtype, has_bias, device, *, shuffled=False):
    """Groups of very different scales; returns the packed layer, its weights in fp64 and their largest terms."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2**num_bits, (num_out, num_in), generator=generator, dtype=torch.uint8)
    scales = normal(num_out, num_in // group_size, seed=seed + 1).exp() * (num_in**-0.5 / 2**num_bits)
    offsets = -scales * torch.rand(scales.shape, generator=generator) * 2**num_bits
    order = torch.randperm(num_in, generator=generator) if shuffled else None
    bias = normal(num_out, seed=seed + 2).to(dtype) if has_bias else None
    weights = GroupedWeights(values, scales, offsets, num_bits, order)
    factors, terms = (numbers.double().repeat_interleave(group_size, 1) for numbers in (scales, offsets))
    exact = values.double() * factors + terms
    largest = values.double().maximum(torch.tensor(128.0)) * factors + terms.abs()
    if order is not None:
        exact, largest = exact[:, order.argsort()], largest[:, order.argsort()]
    on_device = weights._replace(
        values=values.to(device), scales=scales.to(device), offsets=offsets.to(device),
        input_order=None if order is None else order.to(device),
    )  # fmt: skip
    span = grouped_span(num_in, group_size, num_bits)
    layer = pack_grouped(on_device, None if bias is None else bias.to(device), dtype, span)
    return layer, exact, largest


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("dtype", "num_bits", "group_size", "has_bias", "num_processors", "num_rows", "num_in", "num_out"),
    [
        (torch.float32, 4, 32, True, ALONE, 3, 192, 72),
        (torch.float16, 4, 128, False, SHARED, 20, 1152, 99),  # two parts, the second with fewer steps
        (torch.bfloat16, 4, 16, True, ALONE, 5, 1056, 40),
        (torch.bfloat16, 8, 32, True, SHARED, 70, 1120, 64),
        pytest.param(torch.float32, 8, 2048, False, SHARED, 200, 2048, 256, marks=pytest.mark.slow),
    ],
)
def test_products_of_integers_equal_sums_in_fp64(
    device,
    target,
    seed,
    dtype,
    num_bits,
    group_size,
    has_bias,
    num_processors,
    num_rows,
    num_in,
    num_out,
    batch_invariant,
):
    """An element is off by n roundings of fp32 of the sum of its n terms' magnitudes, and by that of the result.

    Terms are value times scale and offset, each times an input: they may cancel.
    """
    layer, weight, largest = make_grouped(seed, num_in, num_out, group_size, num_bits, dtype, has_bias, device)
    assert layer.weight.nbytes == num_in * num_out * num_bits // 8
    x = (normal(num_rows, num_in, seed=seed + 3) * normal(num_rows, 1, seed=seed + 4).exp()).to(device, dtype)
    options = {"num_processors": num_processors, "batch_invariant": batch_invariant}
    out = tiled_linear(x, layer, target=target, **options)
    assert out.dtype is dtype
    rows = x.cpu().double()
    exact = rows @ weight.T + (0 if layer.bias is None else layer.bias.cpu().double())
    magnitudes = rows.abs() @ largest.T + (0 if layer.bias is None else layer.bias.cpu().double().abs())
    allowed = num_in * 2.0**-24 * magnitudes + torch.finfo(dtype).eps * exact.abs()
    assert bool(((out.cpu().double() - exact).abs() <= allowed).all())


def test_integers_in_groups_of_inputs_in_another_order(device, target, seed):
    layer, weight, largest = make_grouped(seed, 256, 64, 32, 4, torch.float32, False, device, shuffled=True)
    x = normal(5, 256, seed=seed + 3).to(device)
    out = tiled_linear(x, layer, target=target, num_processors=ALONE, batch_invariant=False).cpu().double()
    rows = x.cpu().double()
    assert bool(((out - rows @ weight.T).abs() <= 256 * 2.0**-24 * (rows.abs() @ largest.T)).all())


@pytest.mark.parametrize("num_processors", [SHARED, ALONE])
@pytest.mark.usefixtures("sums_in_order")
def test_a_row_has_the_same_bits_in_any_batch_with_integers(device, target, seed, num_processors):
    layer, _, _ = make_grouped(seed, 1152, 72, 64, 4, torch.float32, True, device)
    x = normal(67, 1152, seed=seed + 3).to(device)
    whole = invariant_linear(x, layer, target, ALONE)
    for rows in (slice(66, 67), slice(40, 65)):
        assert_same_bits(invariant_linear(x[rows], layer, target, num_processors), whole[rows])


@pytest.mark.parametrize(
    ("num_in", "group_size", "num_bits", "span"),
    [(4096, 128, 4, 32), (4096, 32, 4, 32), (96, 32, 4, 16), (64, 64, 8, 64), (48, 24, 4, None), (32, 8, 8, None)],
)
def test_a_step_lies_in_whole_groups(num_in, group_size, num_bits, span):
    assert grouped_span(num_in, group_size, num_bits) == span
