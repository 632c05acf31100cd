"""The sum of a mixture and of the expert that all tokens share, against PyTorch in fp32."""

import pytest
import torch

from kernels.gpu.shared_expert import add_shared
from kernels.gpu.tiles import MAX_ROW_BYTES
from tests.support.kernels.batches import assert_close


def random_rows(seed, num_rows, n, dtype):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, num_rows, n, generator=generator).to(dtype)
    return *rows.unbind(), torch.randn(n, generator=generator) * n**-0.5


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "n"), [(1, 1), (5, 7), (33, 80), (3, 1536), (2, 4864)])
def test_each_row_has_its_own_factor(device, seed, dtype, num_rows, n):
    mixed, shared, x, gate = random_rows(seed, num_rows, n, dtype)
    wanted = mixed.float() + torch.sigmoid(x.float() @ gate)[:, None] * shared.float()
    out = add_shared(*(rows.to(device, copy=True) for rows in (mixed, shared, x)), gate.to(device))
    assert out.dtype is dtype
    assert_close(out.cpu(), wanted)


def test_a_row_is_the_same_alone_and_in_a_batch(device, seed):
    *rows, gate = (tensor.to(device) for tensor in random_rows(seed, 33, 80, torch.bfloat16))
    alone = add_shared(*(tensor[7:8].clone() for tensor in rows), gate)
    assert torch.equal(add_shared(rows[0].clone(), *rows[1:], gate)[7:8], alone)


def test_nan_stays_in_its_row(device, seed):
    *rows, gate = (tensor.to(device) for tensor in random_rows(seed, 4, 40, torch.float32))
    rows[2][1, 3] = rows[1][2, 5] = torch.nan
    assert add_shared(*rows, gate).isnan().nonzero().tolist() == [*([1, column] for column in range(40)), [2, 5]]


def test_an_empty_batch_gives_no_rows(device):
    empty = torch.empty(0, 80, device=device)
    assert add_shared(empty, empty, empty, torch.ones(80, device=device)).shape == (0, 80)


def test_errors_name_what_is_wrong(device):
    rows, gate = torch.ones(2, 4, device=device), torch.ones(4, device=device)
    with pytest.raises(ValueError, match=r"mixed is torch\.float32 of shape \[2, 4\], shared .* of \[1, 4\]"):
        add_shared(rows, rows[:1], rows, gate)
    with pytest.raises(ValueError, match=r"x torch\.bfloat16 of \[2, 4\]"):
        add_shared(rows, rows, rows.bfloat16(), gate)
    with pytest.raises(ValueError, match=r"gate is torch\.float32 of shape \[3\], .* expected 4 fp32 values"):
        add_shared(rows, rows, rows, gate[:3])
    with pytest.raises(ValueError, match=r"gate is torch\.bfloat16 of shape \[4\]"):
        add_shared(rows, rows, rows, gate.bfloat16())
    with pytest.raises(ValueError, match=r"mixed has shape \[2, 3\], strides \(4, 1\); expected whole rows"):
        add_shared(rows[:, :3], rows, rows, gate)
    wide = torch.ones(1, MAX_ROW_BYTES // 4 + 1, device=device)
    with pytest.raises(ValueError, match=r"GPU operations on whole rows take up to"):
        add_shared(wide, wide, wide, wide[0])
