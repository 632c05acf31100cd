"""The pair with its HTTP endpoint, and Anthropic's own client in front of it."""

from collections.abc import Callable
from typing import Any

import anthropic
import pytest


@pytest.fixture
def sdk() -> tuple[Callable[..., Any], str]:
    """The client class, and the path of its base URL."""
    return anthropic.AsyncAnthropic, ""
