"""Each extra's requirements are enough for what it promises: everything else is hidden, the imports still work."""

import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.packages import hidden_modules, hiding, requirements

ROOT = Path(__file__).resolve().parent.parent
CHECK = SimpleNamespace(**runpy.run_path(str(ROOT / ".ci" / "check_extras.py")))


@pytest.mark.parametrize("extra", CHECK.PROMISES)
def test_extra_alone_imports_what_it_promises(extra: str, tmp_path: Path) -> None:
    allowed = requirements("chairlift", extra, set()) | {"setuptools", "pip"}
    hidden = hidden_modules(allowed)
    if extra != "engine":
        assert "numba" in hidden
        torch_needs_triton = extra == "transformers" and torch.version.cuda is not None
        assert ("triton" in hidden) == (not torch_needs_triton)
    assert ("torch" in hidden) == (extra not in ("engine", "transformers"))
    assert ("transformers" in hidden) == (extra != "transformers")
    done = subprocess.run(
        [sys.executable, "-c", hiding(hidden) + CHECK.IMPORT_ALL, *CHECK.PROMISES[extra]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
