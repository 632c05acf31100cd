"""Fixtures: the address of the frontend of `pair`, and its fake engine, which answers every prompt with the prompt."""

import pytest


@pytest.fixture
def engine(pair):
    return pair.engine


@pytest.fixture
def target(pair):
    return f"127.0.0.1:{pair.app.port}"
