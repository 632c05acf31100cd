"""The Triton form of Philox gives the words of the reference, which has the published known answers."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.gpu.philox import group_words, load_key, token_words
from kernels.reference.philox import token_words as reference_words


@triton.jit
def _words_kernel(seed_ptr, position_ptr, ids_ptr, words_ptr, grouped_ptr, GROUPS: tl.constexpr):
    position, k0, k1 = load_key(seed_ptr, position_ptr, 0)
    ids = tl.load(ids_ptr + tl.arange(0, GROUPS * 4))
    tl.store(words_ptr + tl.arange(0, GROUPS * 4), token_words(ids, position, k0, k1).to(tl.int32, bitcast=True))
    groups = tl.arange(0, GROUPS)
    words = group_words(groups + 13, position, k0, k1)
    tl.store(grouped_ptr + groups[:, None] * 4 + tl.arange(0, 4)[None, :], words.to(tl.int32, bitcast=True))


@pytest.mark.parametrize("key", [0, 1, 0xA4093822_299F31D0, 2**63, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 - 1])
def test_words_equal_the_reference(device, seed, key, position):
    ids = np.random.default_rng(seed).integers(0, 1 << 19, 64)
    words, grouped = (torch.full((64,), 0x55, dtype=torch.int32, device=device) for _ in range(2))
    _words_kernel[(1,)](
        torch.tensor([key - 2**64 * (key >= 2**63)], device=device),
        torch.tensor([position], device=device),
        torch.from_numpy(ids.astype(np.int32)).to(device),
        words,
        grouped,
        GROUPS=16,
    )
    assert words.cpu().numpy().view(np.uint32).tolist() == reference_words(key, position, ids).tolist()
    want = reference_words(key, position, np.arange(4 * 13, 4 * 13 + 64))
    assert grouped.cpu().numpy().view(np.uint32).tolist() == want.tolist()
