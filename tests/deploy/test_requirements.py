from pathlib import Path

import pytest

from deploy.requirements import requirements


def test_frontend_image_asks_for_nothing_that_computes(root: Path) -> None:
    lines = requirements(root / "pyproject.toml", ["frontend", "otel"])
    assert not [line for line in lines if line.startswith(("torch", "triton", "numba"))]


def test_unknown_extra_is_named(root: Path) -> None:
    with pytest.raises(SystemExit, match="no extra 'motor'; EXTRA is one of frontend, engine"):
        requirements(root / "pyproject.toml", ["motor"])
