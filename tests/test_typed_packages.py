"""What the wheel must hold so that type checkers of its users see the Python client's types (PEP 561)."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


@pytest.mark.parametrize("package", ["chairlift", "frontend"])
def test_package_says_that_it_is_typed_and_the_wheel_takes_the_mark(package: str) -> None:
    assert (ROOT / SETUPTOOLS["package-dir"][package] / "py.typed").is_file()
    assert package in SETUPTOOLS["packages"]
    assert {"py.typed", "*.pyi"} <= set(SETUPTOOLS["package-data"]["*"])
