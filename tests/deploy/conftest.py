"""The files under deploy/ as modules: they are no package, because images hold them beside Chairlift, not in it."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture
def load() -> Callable[[str], ModuleType]:
    """load(name): the module deploy/NAME.py."""

    def load_file(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, ROOT / "deploy" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_file
