"""The soft cap of logits against tanh in fp64."""

import pytest
import torch

from kernels.gpu.soft_cap import soft_cap


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("n", [1, 211, 4096, 5000])
def test_caps_in_place(device, seed, num_rows, n):
    """The polynomial and exp are within 2e-7, the steps of fp32 around them within 1e-7 each."""
    x = 60 * torch.randn(num_rows, n, generator=torch.Generator().manual_seed(seed))
    expected = 30 * torch.tanh(x.double() / 30)
    logits = x.to(device)
    assert soft_cap(logits, 30.0) is logits
    torch.testing.assert_close(logits.cpu().double(), expected, rtol=1e-6, atol=0)


def test_is_exact_from_tiny_values_to_infinity(device):
    sizes = torch.cat((torch.logspace(-30, 3, 996), torch.tensor([0.0, 1e30, torch.inf, torch.nan])))
    x = torch.stack((sizes, -sizes))
    expected = 2.5 * torch.tanh(x.double() / 2.5)
    capped = soft_cap(x.to(device), 2.5).cpu().double()
    torch.testing.assert_close(capped, expected, rtol=1e-6, atol=0, equal_nan=True)


def test_errors_name_what_is_wrong(device):
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 4\]"):
        soft_cap(torch.ones(2, 3, 4, device=device), 30.0)
    with pytest.raises(ValueError, match=r"x is torch\.bfloat16, expected float32"):
        soft_cap(torch.ones(2, 3, dtype=torch.bfloat16, device=device), 30.0)
