"""Each extra's requirements are enough for what it promises: everything else is hidden, the imports still work."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.packages import hidden_modules, hiding, requirements

ROOT = Path(__file__).resolve().parent.parent


def load_check_extras() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_extras", ROOT / ".ci" / "check_extras.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = load_check_extras()


@pytest.mark.parametrize("extra", CHECK.PROMISES)
def test_extra_alone_imports_what_it_promises(extra: str, tmp_path: Path) -> None:
    allowed = requirements("chairlift", extra, set()) | {"setuptools", "pip"}
    hidden = hidden_modules(allowed)
    if extra != "engine":
        assert {"torch", "triton", "numba"} <= hidden
    done = subprocess.run(
        [sys.executable, "-c", hiding(hidden) + CHECK.IMPORT_ALL, *CHECK.PROMISES[extra]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
