"""Gumbel noise in fp32 and fp64 against numpy, at the ends of its range and in between."""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.gpu.gumbel import exact_noise, fast_noise

SIZE = 1 << 16


@triton.jit
def _noise_kernel(words_ptr, exact_ptr, fast_ptr, SIZE: tl.constexpr):
    offsets = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    words = tl.load(words_ptr + offsets).to(tl.uint32, bitcast=True)
    tl.store(exact_ptr + offsets, exact_noise(words))
    tl.store(fast_ptr + offsets, fast_noise(words))


def noise(device, words):
    exact = torch.full((len(words),), torch.nan, dtype=torch.float64, device=device)
    fast = torch.full((len(words),), torch.nan, device=device)
    block = min(len(words), 1024 if device.type == "cuda" else SIZE)
    _noise_kernel[(len(words) // block,)](
        torch.from_numpy(words.astype(np.uint32).view(np.int32)).to(device), exact, fast, SIZE=block
    )
    return exact.cpu().numpy(), fast.cpu().numpy()


def test_noise_is_exact_in_fp64_and_close_in_fp32(device, seed):
    """Half of the words are near the ends: noise there decides most draws of large vocabularies."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**32, SIZE)
    steps = np.minimum(2 ** rng.integers(0, 31, SIZE // 4) * rng.integers(1, 4, SIZE // 4) - 1, 2**32 - 1)
    words[: SIZE // 4] = steps
    words[SIZE // 4 : SIZE // 2] = 2**32 - 1 - steps
    words[:4] = [0, 2**31 - 1, 2**31, 2**32 - 1]
    want = -np.log(-np.log((words + 0.5) / 2**32))
    exact, fast = noise(device, words)
    np.testing.assert_allclose(exact, want, rtol=1e-14, atol=1e-14)
    error = np.abs(fast - want)
    assert error.max() < 4e-7 + 23 * 2**-23, f"word {words[error.argmax()]:#x} is off by {error.max()}"
    assert want.min() > -3.14
    assert want.max() < 22.88
