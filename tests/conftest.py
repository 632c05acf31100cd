"""What holds for all tests."""

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Processes that tests start hear SIGINT, even where the suite runs in the background with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)
