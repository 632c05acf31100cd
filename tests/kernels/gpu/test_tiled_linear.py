"""Linear layers for `--batch-invariant`: values against torch, and the same bits of a row in any batch."""

import pytest
import torch

from kernels.gpu import tiled_linear as module
from kernels.gpu.linear import pack_linear
from kernels.gpu.tiled_linear import tiled_linear
from kernels.gpu.tiles import ProductTile, product_splits, product_tile
from tests.support.kernels.batches import assert_close, assert_same_bits

SHARED, ALONE = 1_000_000, 1  # processors: a program for each part of the inputs, or one for all of them


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(seed, num_in, num_out, dtype, has_bias, device, target):
    weight = (normal(seed, num_out, num_in) * num_in**-0.5).to(device, dtype)
    bias = normal(seed + 1, num_out).to(device, dtype) if has_bias else None
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
    x = normal(seed + 2, num_rows, num_in).to(device, dtype)
    out = invariant_linear(x, layer, target, num_processors)
    assert out.dtype is dtype
    bias = None if layer.bias is None else layer.bias.double()
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), bias)
    assert_close(out.cpu(), exact.float().cpu())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_any_batch(device, target, seed, dtype):
    """Whatever its place in its tile, the other rows, and the number of programs that share its inputs."""
    layer = make_layer(seed, 1037, 99, dtype, True, device, target)
    assert product_splits(product_tile(target, dtype.itemsize), 1037, 99) == 2
    x = normal(seed + 2, 67, 1037).to(device, dtype)
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
