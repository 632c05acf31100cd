"""Benchmarks set the number of threads of the whole process: it is put back after each test."""

from collections.abc import Iterator

import numba
import pytest
import torch


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    num_threads = torch.get_num_threads(), numba.get_num_threads()
    yield
    torch.set_num_threads(num_threads[0])
    numba.set_num_threads(num_threads[1])
