"""The files of deploy/monitoring."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def monitoring() -> Path:
    """deploy/monitoring."""
    return HERE.parents[2] / "deploy" / "monitoring"
