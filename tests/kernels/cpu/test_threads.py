"""`set_num_threads` sets the pools of PyTorch and numba."""

import re

import numba
import pytest
import torch

from kernels.cpu.threads import set_num_threads


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(before[0])
    numba.set_num_threads(before[1])


@pytest.mark.usefixtures("restored_threads")
def test_set_num_threads_sets_both_pools():
    for num_threads in {1, numba.config.NUMBA_NUM_THREADS}:
        set_num_threads(num_threads)
        assert (torch.get_num_threads(), numba.get_num_threads()) == (num_threads, num_threads)
    assert numba.threading_layer() == "workqueue"


@pytest.mark.parametrize("num_threads", [0, -1, numba.config.NUMBA_NUM_THREADS + 1])
def test_set_num_threads_names_the_limit(num_threads):
    limit = numba.config.NUMBA_NUM_THREADS
    with pytest.raises(ValueError, match=re.escape(f"{num_threads} threads asked for, 1 to {limit} can be had")):
        set_num_threads(num_threads)
