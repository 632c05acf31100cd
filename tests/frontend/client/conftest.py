"""Where the frontend of `pair` is, and the fake engine behind it, which answers every prompt with the prompt."""

import pytest


@pytest.fixture
def engine(pair):
    return pair.engine


@pytest.fixture
def target(pair):
    return f"127.0.0.1:{pair.app.port}"
