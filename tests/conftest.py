"""What holds for all tests.

GPU kernels run on the GPU where there is one, else under Triton's interpreter. Triton asks when it is imported, which a
test of anything may do: so this is decided here, first of all.
"""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Processes that tests start hear SIGINT, even where the suite runs in the background with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
