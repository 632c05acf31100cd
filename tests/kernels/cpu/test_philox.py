"""The numba form of Philox gives the words of the reference, which has the published known answers."""

import numpy as np
import pytest

from kernels.cpu.philox import fill_words
from kernels.reference.philox import token_words


@pytest.mark.parametrize("seed", [0, 1, 0xA4093822_299F31D0, 2**64 - 1])
@pytest.mark.parametrize(("first_group", "num_groups"), [(0, 1), (0, 64), (13, 7), (37_499, 1)])
def test_words_equal_the_reference(seed, first_group, num_groups):
    words = np.full((4, num_groups + 1), 0xABCD, dtype=np.uint32)
    fill_words(words, first_group, num_groups, 2**31, np.uint64(seed))
    want = token_words(seed, 2**31, np.arange(4 * first_group, 4 * (first_group + num_groups)))
    assert words[:, :num_groups].T.ravel().tolist() == want.tolist()
    assert (words[:, num_groups] == 0xABCD).all()
