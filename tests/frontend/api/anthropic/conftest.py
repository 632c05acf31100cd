"""Anthropic's own client."""

from collections.abc import Callable
from typing import Any

import anthropic
import pytest


@pytest.fixture(scope="session")
def sdk() -> tuple[Callable[..., Any], Callable[..., Any], str]:
    """The client, its HTTP client, and the path of its base URL."""
    return anthropic.AsyncAnthropic, anthropic.DefaultAsyncHttpxClient, ""
